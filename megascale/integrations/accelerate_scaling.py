"""What Accelerate does otherwise in 16 bits: skips on the device, one scale per iteration, reduction in fp32."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import MixedPrecisionPolicy

from megascale.amp import GradScaler


class SkipOnDevice(AcceleratedOptimizer):
    """A prepared optimizer whose skip decision is on the device and is read on the host only on request."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: GradScaler | None, *, device_placement: bool) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=scaler)
        self._found_inf: Tensor | None = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, on every rank alike. Reads the device once a step: a host sync."""
        if self._found_inf is not None:
            self._is_overflow = bool(self._found_inf)
            self._found_inf = None
        return self._is_overflow


class ScaledOptimizer(SkipOnDevice):
    """A torch optimizer that steps through :class:`megascale.amp.GradScaler`.

    Accelerate counts a step as skipped if ``optimizer.step`` was not called. A fused optimizer, which skips on the
    device, is always called.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, iteration: "ScaledIteration", *, device_placement: bool):
        super().__init__(optimizer, iteration.scaler, device_placement=device_placement)
        self._iteration = iteration
        iteration.optimizers.add(self)

    def step(self, closure: Any = None) -> None:
        """At the end of an accumulation, step; the last optimizer of an iteration updates the scale."""
        if not self.gradient_state.sync_gradients:
            return
        self._iteration.begin_step(self)
        self.scaler.step(self.optimizer, closure)
        flags = list(self.scaler._found_inf_per_device(self.optimizer).values())
        self._found_inf = torch.stack([flag.to(flags[0].device) for flag in flags]).amax() if flags else None
        self._iteration.end_step(self)


class ScaledIteration:
    """Updates the scale once per iteration, whatever the number of optimizers that step in it.

    If the first of two optimizers updated the scale, the other's gradients, which the old scale has multiplied, would
    be divided by the new one. An iteration ends when all optimizers have stepped; if only some do, as with the two
    losses of a GAN, before a backward that finds no gradient of the others, or when state is saved or loaded.

    Args:
        scaler: of all optimizers.

    Attributes:
        optimizers: that were prepared with the scaler and are still there.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.optimizers: WeakSet[ScaledOptimizer] = WeakSet()
        self._stepped: WeakSet[ScaledOptimizer] = WeakSet()

    def begin_step(self, optimizer: ScaledOptimizer) -> None:
        """End the iteration before, if ``optimizer`` has stepped in it."""
        if optimizer in self._stepped:
            self.finish()

    def end_step(self, optimizer: ScaledOptimizer) -> None:
        """Take note that ``optimizer`` has stepped; update the scale if it is the last."""
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self.optimizers):
            self.finish()

    def begin_backward(self) -> None:
        """End the iteration, unless an optimizer that has not stepped holds gradients, which the scale has multiplied.

        So it is where each of several optimizers accumulates its own losses.
        """
        waiting = [each for each in self.optimizers if each not in self._stepped]
        if all(param.grad is None for each in waiting for param in _params(each)):
            self.finish()

    def finish(self) -> None:
        """Update the scale if any optimizer has stepped since the last update."""
        if self._stepped:
            self._stepped.clear()
            self.scaler.update()

    def scaled(self, params: list[Tensor] | None) -> list[ScaledOptimizer]:
        """Return the optimizers whose gradients are still scaled in this iteration.

        ``params``: only optimizers of these parameters; None: of any.
        """
        given = None if params is None else {id(param) for param in params}
        found = []
        for prepared in self.optimizers:
            is_meant = given is None or any(id(param) in given for param in _params(prepared))
            if is_meant and self.scaler._per_optimizer_states[id(prepared.optimizer)]["stage"] is OptState.READY:
                found.append(prepared)
        return found


def reduce_in_fp32(plugin: FullyShardedDataParallelPlugin) -> None:
    """Let FSDP2 reduce gradients in fp32, unless the plugin's policy names a dtype.

    Otherwise ranks would add up gradients of 16-bit parameters in 16 bits, and round at every rank: Accelerate leaves
    that to the user, and ``fsdp_config`` of TrainingArguments has no key for it.
    """
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy) and policy.reduce_dtype is None:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)


def _params(prepared: ScaledOptimizer) -> Iterator[Tensor]:
    return (param for group in prepared.optimizer.param_groups for param in group["params"])
