"""UnderflowMeter: how much of the gradients fp16 loses at this loss scale, and how far they are from overflow."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentTypeError, UsageError, listed
from megascale.host_view import HostView
from megascale.main_params.main_param import MainParam
from megascale.step.grad_stats import Holders
from megascale.step.member import StepMember
from megascale.step.misuse import Statistics
from megascale.step.result import StepObserver, StepRecord
from megascale.utils import validate
from megascale.utils.collectives import all_gather_object
from megascale.utils.transfer import is_capturing, to_device_async

LARGEST_FP16 = torch.finfo(torch.float16).max
SMALLEST_NORMAL_FP16 = torch.finfo(torch.float16).smallest_normal
MARGIN = 1
"""Powers of two that a suggested scale leaves between the largest gradient and overflow."""


class UnderflowMeter(StepObserver):
    """Measures every n-th step's scaled gradients, on the device. The host reads the numbers one step late.

    A sample costs some passes over the gradients; other steps cost nothing. Steps that were skipped are not measured.
    It is about this rank's gradients as the step was given them: reduced, and under a DistributedOptimizer this rank's
    pieces. ``flush(gather=True)`` tells of those of all ranks. Gradients of other dtypes are measured as if they were
    fp16.

    Args:
        optimizer: whose ``step()`` is watched until :meth:`remove`. Of members of a ChainedOptimizer: the chain.
        every: steps from one sample to the next; the first step is one.

    Raises ArgumentError or ArgumentTypeError, naming the argument; UsageError for a member of a ChainedOptimizer, here
    or, where it is chained afterwards, as soon as numbers are asked for.
    """

    def __init__(self, optimizer: MegascaleOptimizer, every: int = 100) -> None:
        if not isinstance(optimizer, MegascaleOptimizer):
            raise ArgumentTypeError(
                "optimizer must be a MixedPrecisionOptimizer, DistributedOptimizer or ChainedOptimizer, got "
                f"{type(optimizer).__name__}"
            )
        self._every = validate.integer("every", every, minimum=1)
        self._recipe = optimizer._recipe
        self._refuse_member()
        self._device = optimizer._device
        self._view = HostView()
        self._num_steps = 0
        self._scale: Tensor | None = None
        self._raw: dict[str, float] = {}
        self._holders = [
            Holders(self._recipe.groups, sharded=member.main_params.is_sharded) for member in self._recipe.members
        ]
        self._handle = optimizer.register_step_post_hook(self._after_step)
        self._recipe.observers.append(self)

    @property
    def latest(self) -> dict[str, float]:
        """The newest sample that the host knows: empty before the first, never waited for.

        ``step`` counts from 0 since the meter was made, ``scale`` is the loss scale of that step, and
        ``suggested_scale`` the largest power of two times it that leaves one power of two of headroom in every group.
        For each param group, by its index: ``group0/zeros``, the share of elements that are zero;
        ``group0/subnormals``, the share that are not zero and below fp16's smallest normal number;
        ``group0/headroom``, log2(65504 / largest magnitude), infinite where all are zero.
        """
        self._refuse_member()
        return _described(self._raw)

    def flush(self, *, gather: bool = False) -> dict[str, float]:
        """Wait for the newest sample, and return it.

        Args:
            gather: return the sample of all ranks that skip together, which call it together and get the same: shares
                of the elements of all, each counted once, however many ranks hold it, and the least headroom. The ranks
                exchange their numbers here; steps send nothing.

        Raises UsageError, on every rank alike, if the ranks have measured different steps.
        """
        self._refuse_member()
        self._take(self._view.flush())
        if not validate.flag("gather", gather):
            return self.latest
        ranks = all_gather_object(self._raw, self._recipe.groups.grad_stats)
        steps = sorted({rank.get("step", -1.0) for rank in ranks})
        if len(steps) > 1:
            raise UsageError(
                f"ranks have measured different steps, {', '.join(f'{step:g}' for step in steps)} (-1: none); make the "
                "UnderflowMeter on all ranks after the same step, with the same every"
            )
        return _described(_added(ranks))

    def remove(self) -> None:
        """End the measurements."""
        self._handle.remove()
        if self in self._recipe.observers:
            self._recipe.observers.remove(self)

    def _refuse_member(self) -> None:
        """Raise UsageError if a chain steps this optimizer: hooks of its own ``step()`` never run."""
        if self._recipe.members[0].chain is not None and self._recipe.members[0].chain() not in (None, self._recipe):
            names = [param.name for member in self._recipe.members for param in member.main_params]
            raise UsageError(
                f"the optimizer of {listed(names)} is a member of a ChainedOptimizer, whose step() an UnderflowMeter "
                "on the member does not see; make the UnderflowMeter of the ChainedOptimizer"
            )

    def on_step(self, agreed: Statistics | None, record: StepRecord, *, overflowed: bool) -> None:
        """Keep the scale of a step that is to be measured, before it changes: clipping may begin the step early."""
        if self._is_due():
            self._scale = None if record.scaler is None else record.scaler.live_scale.clone()

    def _is_due(self) -> bool:
        return self._num_steps % self._every == 0 and not is_capturing(self._device)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self._take(self._view.flush())
        if self._is_due():
            self._view.push(self._sample())
        self._num_steps += 1

    def _sample(self) -> dict[str, Tensor | float]:
        """Return the raw numbers of this step's gradients, by name."""
        values: dict[str, Tensor | float] = {"step": self._num_steps}
        result = self._recipe.last_result
        if result is not None:
            values["landed"] = result.success
        if self._scale is not None:
            values["scale"] = self._scale
        index = 0
        for member, holders in zip(self._recipe.members, self._holders, strict=True):
            for group in member.main_params.ordered:
                parts = self._parts(member, group, holders)
                if parts is not None:
                    sums = parts.sum(0)
                    for place, name in enumerate(("zeros", "small", "numel")):
                        values[f"{index}/{name}"] = sums[place]
                    values[f"{index}/largest"] = parts[:, 3].amax()
                index += 1
        return values

    def _parts(self, member: StepMember, group: Iterable[MainParam], holders: Holders) -> Tensor | None:
        """Return one row of :func:`_measure` for each gradient, its counts divided by the number of its holders."""
        rows = []
        for param in group:
            grad = member.grads.grad_of(param)
            if grad is not None and grad.numel():
                row = _measure(grad, holders.of(param.model).share)
                rows.append(to_device_async(row, self._device))
        return torch.stack(rows) if rows else None

    def _take(self, seen: dict[str, float] | None) -> None:
        """Keep what the device has counted; drop a step that was skipped."""
        if seen is not None and seen.get("landed", 1.0) and all(math.isfinite(value) for value in seen.values()):
            self._raw = seen


def _added(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return the counts of all ranks together, and their largest magnitudes."""
    found = dict(ranks[0])
    for rank in ranks[1:]:
        for name, value in rank.items():
            if name.endswith("/largest"):
                found[name] = max(found.get(name, 0.0), value)
            elif "/" in name:
                found[name] = found.get(name, 0.0) + value
    return found


def _described(seen: dict[str, float]) -> dict[str, float]:
    """Make shares and powers of two of what was counted; empty where nothing was."""
    if not seen:
        return {}
    scale = seen.get("scale", 1.0)
    found = {"step": seen["step"], "scale": scale}
    lowest = math.inf
    for index in sorted(int(key.removesuffix("/numel")) for key in seen if key.endswith("/numel")):
        numel, largest = seen[f"{index}/numel"], seen[f"{index}/largest"]
        if not numel:
            continue
        headroom = math.log2(LARGEST_FP16 / largest) if largest else math.inf
        lowest = min(lowest, headroom)
        found[f"group{index}/zeros"] = seen[f"{index}/zeros"] / numel
        found[f"group{index}/subnormals"] = (seen[f"{index}/small"] - seen[f"{index}/zeros"]) / numel
        found[f"group{index}/headroom"] = headroom
    found["suggested_scale"] = scale * 2.0 ** (math.floor(lowest) - MARGIN) if math.isfinite(lowest) else scale
    return found


def _measure(grad: Tensor, share: float) -> Tensor:
    """Return zeros, elements below fp16's smallest normal number, elements, and the largest magnitude: shape [4].

    The counts are multiplied by ``share``.
    """
    exact = torch.float64
    size = grad.detach().abs()
    zeros, small = (size == 0).sum(), (size < SMALLEST_NORMAL_FP16).sum()
    numel = torch.full_like(zeros, grad.numel(), dtype=exact)
    return torch.stack([zeros.to(exact) * share, small.to(exact) * share, numel * share, size.amax().to(exact)])
