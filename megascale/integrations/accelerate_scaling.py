"""What Accelerate does otherwise in 16 bits: skips on the device, reduction in fp32."""

from dataclasses import replace
from typing import Any

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

    @property
    def is_unscaled(self) -> bool:
        """Whether this iteration's gradients are divided by the scale already."""
        return self.scaler._per_optimizer_states[id(self.optimizer)]["stage"] is not OptState.READY

    def step(self, closure: Any = None) -> None:
        """At the end of an accumulation, step and update the scale."""
        if not self.gradient_state.sync_gradients:
            return
        self.scaler.step(self.optimizer, closure)
        flags = list(self.scaler._found_inf_per_device(self.optimizer).values())
        self._found_inf = torch.stack([flag.to(flags[0].device) for flag in flags]).amax() if flags else None
        self.scaler.update()


def reduce_in_fp32(plugin: FullyShardedDataParallelPlugin) -> None:
    """Let FSDP2 reduce gradients in fp32, unless the plugin's policy names a dtype.

    Otherwise ranks would add up gradients of 16-bit parameters in 16 bits, and round at every rank: Accelerate leaves
    that to the user, and ``fsdp_config`` of TrainingArguments has no key for it.
    """
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy) and policy.reduce_dtype is None:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)
