"""HostUpdate: main params and state in host memory, updated there by the host's kernels: the bits of a device's.

Gradients travel to the host, with overlap while backward runs, and behind it the decision's few numbers. A thread waits
for them, nobody else does. The thread updates unit by unit, in the order of the next forward, and each unit's 16-bit
weights travel back at once. No main param and no state is written before the decision has arrived, so clipping and
skipping are exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megascale.config import StepConfig
from megascale.errors import GradientError, InnerStepError, UsageError
from megascale.kernels import Backend, Decision, TensorList, host_backend
from megascale.main_params.grad_copies import GradCopies
from megascale.main_params.host_buffers import HostBuffers, make_grad_memory
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.main_params.weight_arrivals import WeightArrivals
from megascale.rules import Rule
from megascale.step.kernel_update import KernelUpdate
from megascale.step.update import MarkWritten, OverflowFlags, PendingUpdate
from megascale.utils import call_site
from megascale.utils.streams import has_streams
from megascale.utils.unraised import UnraisedError


@dataclass
class _Findings:
    """What updates in the thread have found, until the caller's thread takes it.

    The thread's tasks hold it in place of the HostUpdate: who drops an optimizer must be the one to free it, and waits
    in :class:`WeightArrivals` until the model is whole. A task that kept it alive would free it in the thread instead.
    """

    flags: list[OverflowFlags] = field(default_factory=list)
    failure: UnraisedError = field(default_factory=lambda: UnraisedError(_warn_of_failure))


def _warn_of_failure(message: str) -> None:
    """Warn of an update's error that no step, state_dict() or save has raised."""
    call_site.warn(
        f"the last update failed in host memory, {message}; some main params and weights may be updated and others "
        "not: load the checkpoint before",
        RuntimeWarning,
    )


class HostUpdate(KernelUpdate):
    """Updates main params that live in host memory there, others as :class:`KernelUpdate` does.

    Args:
        optimizer, backend, config, rule: see :class:`KernelUpdate`.
        device: of the model params.
        arrivals: runs the updates and sends the weights.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        config: StepConfig,
        rule: Rule,
        device: torch.device,
        arrivals: WeightArrivals,
    ) -> None:
        super().__init__(optimizer, backend, config, rule)
        self.host_backend = host_backend()
        self._device = device
        self._arrivals = arrivals
        self._overlaps, self._pins = config.overlap_cpu_optimizer_d2h_h2d, config.pin_cpu_grads
        self._copies: GradCopies | None = None
        if self._overlaps and self._pins and has_streams(device):
            self._copies = GradCopies(device, arrivals)
        self._findings = _Findings()
        self._numbers = torch.zeros(3, dtype=torch.float32, device="cpu", pin_memory=device.type != "cpu")

    @override
    def backend_of(self, unit: UpdateUnit) -> Backend:
        return self.host_backend if unit.is_on_host else self.backend

    @override
    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        super().create_states(options, params)
        there = [param for param in params if param.on_host is not None]
        if self._overlaps:
            self._arrivals.find_modules(there)
        if self._copies is not None:
            self._copies.follow(there)
        self._findings.flags.clear()

    @override
    def update_signature(self) -> str:
        return f"{super().update_signature()}; in host memory backend {self.host_backend.name}"

    @override
    def why_not_capturable(self) -> str | None:
        return "optimizer_cpu_offload=True: a thread of the host computes the update"

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        """See :class:`GeneralUpdate`. Raises InnerStepError if the update before has failed in the thread."""
        self.raise_failure()
        prepared = super().prepare(
            [self._on_host(pending) if pending.unit.is_on_host else pending for pending in updates]
        )
        return [replace(pending, calls=one.calls) for pending, one in zip(updates, prepared, strict=True)]

    @override
    def prepare_own_step(self, updates: Sequence[PendingUpdate], why: str) -> list[PendingUpdate]:
        if any(pending.unit.is_on_host for pending in updates):
            raise UsageError(
                f"{type(self.optimizer).__name__} has {why}, or set optimizer_cpu_offload=False; otherwise its own "
                "step() must run, which is not for main params in host memory"
            )
        return super().prepare_own_step(updates, why)

    def _on_host(self, pending: PendingUpdate) -> PendingUpdate:
        """Return a unit as the thread updates it, which may read options later: a rate in host memory is copied.

        Raises UsageError for a rate on a device.
        """
        [options] = pending.options
        lr = options.get("lr")
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            raise UsageError(
                f"lr of a param group is a tensor on {lr.device}, and optimizer_cpu_offload=True updates in host "
                "memory; give it a number, or a tensor on the CPU"
            )
        grads = make_grad_memory(_buffers(pending), pending.grads, pin=self._pins)
        copied = options | {"lr": lr.clone()} if isinstance(lr, Tensor) else options
        return replace(pending, grads=grads, options=[copied])

    @override
    def raise_failure(self) -> None:
        self._arrivals.wait()
        if (failure := self._findings.failure.take()) is not None:
            if isinstance(failure, GradientError):
                raise failure
            raise InnerStepError(
                f"the last update failed in host memory, {type(failure).__name__}: {failure}; some main "
                "params may be updated and others not: mend the cause, then load a checkpoint or a state dict"
            ) from failure

    @override
    def forget_failure(self) -> None:
        self._arrivals.wait()
        self._findings.failure.take()

    @override
    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        """See :class:`GeneralUpdate`. With overlap it returns flags of the step before: this one's are not known."""
        here = [pending for pending in updates if not pending.unit.is_on_host]
        there = [pending for pending in updates if pending.unit.is_on_host]
        # First what the device updates: it works while gradients travel.
        rounded = super().apply(here, decision, mark_written)
        late = self._taken_flags()
        if not there:
            return [*rounded, *late]
        travelled = self._send_numbers(there, decision)
        # All updates are started before the first one is awaited: the thread works while the next gradients travel.
        for pending in there:
            self._arrivals.start(list(pending.trained()), self._task(pending, travelled))
        for pending in there:
            trained = list(pending.trained())
            if not self._overlaps or self._arrivals.unawaited(trained):
                self._arrivals.wait_for(param.model for param in trained)
            mark_written(pending.unit)  # which gathers a shard, behind the arrival of its weights
        if not self._overlaps:  # all updates have ended
            late = self._taken_flags()
            self.raise_failure()
        return [*rounded, *late]

    def _taken_flags(self) -> list[OverflowFlags]:
        """Return the flags that updates have left, where one of them is set."""
        flags, self._findings.flags = self._findings.flags, []
        return [one for one in flags if bool(one.overflowed.any())]

    def _send_numbers(self, updates: Sequence[PendingUpdate], decision: Decision) -> frozenset[HostBuffers]:
        """Queue the copies of what the thread must know first; return whose gradients have travelled in backward."""
        is_late = has_streams(self._device)
        numbers = [decision.found_inf, decision.coefficient]
        travelled: frozenset[HostBuffers] = frozenset()
        if self._copies is not None:
            travelled, are_written = self._copies.join(
                (param.on_host, grad)
                for pending in updates
                for param, grad in pending.pairs()
                if param.on_host is not None
            )
            numbers.append(are_written)
        for at, number in enumerate(numbers):
            self._numbers[at : at + 1].copy_(number.reshape(1), non_blocking=is_late)
        return travelled

    def _task(self, pending: PendingUpdate, travelled: frozenset[HostBuffers]) -> Callable[[], bool]:
        """Queue the copies of a unit's gradients that have not ``travelled``. Returns its update, for the thread.

        That runs behind the work that is queued on the current stream, and returns whether weights have changed.
        """
        has_stream, copies = has_streams(self._device), list[Tensor | None]()
        for buffers, grad in zip(_buffers(pending), pending.grads, strict=True):
            copies.append(None if grad is None else buffers.grad)
            if grad is not None and buffers.grad is not None and buffers not in travelled:
                buffers.grad.copy_(grad, non_blocking=has_stream)
        arrived = torch.accelerator.current_stream(self._device).record_event() if has_stream else None
        found_inf, coefficient, are_written = self._numbers
        decision = Decision(found_inf, coefficient, coefficient, coefficient)
        # Not self: see _Findings.
        calls, findings = pending.calls, self._findings

        def task() -> bool:
            if findings.failure.error is not None or calls is None:  # prepare() has refused what has none
                return False
            try:
                if arrived is not None:
                    arrived.synchronize()
                if are_written.item() != 0:
                    raise GradientError(
                        "a gradient was written after backward in a way that torch does not count, as through "
                        "grad.data, by a collective or by a kernel of another library, when it had travelled to host "
                        "memory already; that step has updated nothing. Write param.grad itself, as grad.mul_() does, "
                        "or leave overlap_cpu_optimizer_d2h_h2d=False"
                    )
                with torch.no_grad():
                    findings.flags += calls.run(TensorList(copies), decision)
            except Exception as error:  # whatever it is: all ranks raise it at the next step
                findings.failure.note(error, f"{type(error).__name__}: {error}")
                return False
            return found_inf.item() == 0

        return task


def _buffers(pending: PendingUpdate) -> list[HostBuffers]:
    return [param.on_host for param in pending.unit.params if param.on_host is not None]
