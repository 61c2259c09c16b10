"""HostOwnStep: any other optimizer's own ``step()`` on main params in host memory."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from megascale.kernels import Backend, Decision, host_backend
from megascale.main_params.host_twin import copies_in, make_grad_memory
from megascale.main_params.main_param import MainParam
from megascale.step.torch_step import GeneralUpdate
from megascale.step.update import InnerUpdate, MarkWritten, OverflowFlags, PendingUpdate
from megascale.utils.streams import has_streams


class HostOwnStep(GeneralUpdate):
    """Runs it once, on all main params: on those with a twin in host memory, on others where they are.

    The caller runs the step, which reads ``param_groups``, which no thread may change under the caller. The host reads
    `found_inf` before, as it does without offload, and so waits for the gradients' copies, too, which were queued
    first. The weights then travel, and the host does not wait.

    Args:
        optimizer: the wrapped one.
        beside: how it would be run without a twin: by its own step, too.
        device: of the model params.
        pin: pin the memory of gradients in host memory.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, beside: InnerUpdate, device: torch.device, *, pin: bool
    ) -> None:
        if not isinstance(beside, GeneralUpdate):
            raise TypeError(f"beside must run the optimizer's own step, got {type(beside).__name__}")
        super().__init__(optimizer, beside.backend, beside.inner_step)
        self._device, self._pin = device, pin
        self._on_host = host_backend()

    @override
    def backend_on(self, device: torch.device) -> Backend:
        return self._on_host if device.type == "cpu" else self.backend

    @override
    def update_signature(self) -> str:
        return f"{super().update_signature()}, in host memory"

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        """See :class:`GeneralUpdate`. Raises UsageError for too little host memory."""
        ready = super().prepare(updates)
        for pending in ready:
            if twins := pending.twins:
                make_grad_memory(twins, pending.grads, pin=self._pin)
        return ready

    @override
    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        copied = [self._sent(pending) for pending in updates]
        return super().apply(copied, decision, mark_written)

    @override
    def _round(self, params: list[MainParam], decision: Decision) -> Tensor:
        flags = super()._round(params, decision)
        for param in params:
            if param.twin is not None:
                param.part.copy_(param.twin.weights, non_blocking=has_streams(self._device))
        return flags

    def _sent(self, pending: PendingUpdate) -> PendingUpdate:
        """Queue the copies of a unit's gradients to the host; return the unit with them."""
        twins = pending.twins
        if not twins:
            return pending
        copies = copies_in(twins)
        for at in range(len(copies)):
            copies[at].copy_(pending.grads[at], non_blocking=has_streams(self._device))
        return replace(pending, grads=copies)
