"""UnderflowMeter: how much of the gradients fp16 loses at this loss scale, and how far they are from overflow."""

import math
from typing import Any

import torch
from torch import Tensor

from megascale.chained import ChainedOptimizer
from megascale.errors import ArgumentTypeError
from megascale.host_view import HostView
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.utils import validate
from megascale.utils.graph_capture import is_capturing

LARGEST_FP16 = torch.finfo(torch.float16).max
SMALLEST_NORMAL_FP16 = torch.finfo(torch.float16).smallest_normal
MARGIN = 1
"""Powers of two that a suggested scale leaves between the largest gradient and overflow."""


class UnderflowMeter:
    """Measures every n-th step's scaled gradients, on the device. The host reads the numbers one step late.

    A sample costs some passes over the gradients; other steps cost nothing. Steps that were skipped are not measured.
    It is about this rank's gradients as the step was given them: reduced, and under a DistributedOptimizer this rank's
    pieces. Gradients that are not fp16 are measured as if they were.

    Args:
        optimizer: whose ``step()`` is watched until :meth:`remove`.
        every: steps from one sample to the next; the first step is one.

    Raises ArgumentError or ArgumentTypeError, naming the argument.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer | ChainedOptimizer, every: int = 100) -> None:
        if not isinstance(optimizer, (MixedPrecisionOptimizer, ChainedOptimizer)):
            raise ArgumentTypeError(
                "optimizer must be a MixedPrecisionOptimizer, DistributedOptimizer or ChainedOptimizer, got "
                f"{type(optimizer).__name__}"
            )
        self._every = validate.integer("every", every, minimum=1)
        self._recipe = optimizer.recipe
        self._device = optimizer.device
        self._view = HostView()
        self._num_steps = 0
        self._scale: Tensor | None = None
        self._is_waiting = False
        self._latest: dict[str, float] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def latest(self) -> dict[str, float]:
        """The newest sample that the host knows: empty before the first, never waited for.

        ``step`` counts from 0 since the meter was made, ``scale`` is the loss scale of that step, and
        ``suggested_scale`` the largest power of two times it that leaves one power of two of headroom in every group.
        For each param group, by its index: ``group0/zeros``, the share of elements that are zero;
        ``group0/subnormals``, the share that are not zero and below fp16's smallest normal number;
        ``group0/headroom``, log2(65504 / largest magnitude), infinite where all are zero.
        """
        return dict(self._latest)

    def flush(self) -> dict[str, float]:
        """Wait for the newest sample, and return it."""
        self._take(self._view.flush())
        return self.latest

    def remove(self) -> None:
        """End the measurements."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, *_: Any) -> None:
        if self._is_due():
            self._scale = self._recipe.grad_scaler.live_scale.clone() if self._recipe.grad_scaler else None

    def _is_due(self) -> bool:
        return self._num_steps % self._every == 0 and not is_capturing(self._device)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if self._is_waiting:
            self._take(self._view.flush())
        if self._is_due():
            self._is_waiting = True
            self._view.push(self._sample())
        self._num_steps += 1

    def _sample(self) -> dict[str, Tensor | float]:
        """Return the raw numbers of this step's gradients, by name."""
        values: dict[str, Tensor | float] = {"step": self._num_steps}
        if self._scale is not None:
            values["scale"] = self._scale
        index = 0
        for member in self._recipe.members:
            for group in member.main_params.ordered:
                grads = [grad for param in group if (grad := member.grad_of(param)) is not None and grad.numel()]
                if grads:
                    parts = torch.stack([_measure(grad).to(self._device, non_blocking=True) for grad in grads])
                    sums = parts.sum(0)
                    for place, name in enumerate(("zeros", "small", "numel")):
                        values[f"{index}/{name}"] = sums[place]
                    values[f"{index}/largest"] = parts[:, 3].amax()
                index += 1
        return values

    def _take(self, seen: dict[str, float] | None) -> None:
        """Make shares and powers of two of what the device has counted; drop a step that overflowed."""
        self._is_waiting = False
        if seen is None or not all(math.isfinite(value) for value in seen.values()):
            return
        scale = seen.get("scale", 1.0)
        found = {"step": seen["step"], "scale": scale}
        lowest = math.inf
        for key in [key for key in seen if key.endswith("/numel")]:
            index, numel = key.removesuffix("/numel"), seen[key]
            largest = seen[f"{index}/largest"]
            headroom = math.log2(LARGEST_FP16 / largest) if largest else math.inf
            lowest = min(lowest, headroom)
            found[f"group{index}/zeros"] = seen[f"{index}/zeros"] / numel
            found[f"group{index}/subnormals"] = (seen[f"{index}/small"] - seen[f"{index}/zeros"]) / numel
            found[f"group{index}/headroom"] = headroom
        found["suggested_scale"] = scale * 2.0 ** (math.floor(lowest) - MARGIN) if math.isfinite(lowest) else scale
        self._latest = found


def _measure(grad: Tensor) -> Tensor:
    """Return zeros, elements below fp16's smallest normal number, elements, and the largest magnitude: shape [4]."""
    exact = torch.float32 if grad.device.type == "mps" else torch.float64
    size = grad.detach().abs()
    zeros, small = (size == 0).sum(), (size < SMALLEST_NORMAL_FP16).sum()
    return torch.stack(
        [zeros.to(exact), small.to(exact), torch.full_like(zeros, grad.numel(), dtype=exact), size.amax().to(exact)]
    )
