"""OverflowRecorder: keeps what a report of the last skipped step needs.

A step only keeps references to what it has computed anyway, such as the count of non-finite elements of each gradient:
no further pass, message or wait. Gradients themselves are read when a report is asked for while they still exist. With
a listener, a skipped step is described as soon as the host knows of it: at once on a CPU, one step late on an
accelerator, when its gradients are gone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megascale.grad_scaler import MegatronGradScaler
from megascale.kernels import describe_non_finite
from megascale.parallel import ParallelGroups
from megascale.step import non_finite_module
from megascale.step.grad_stats import GradStats
from megascale.step.local_grads import Collected
from megascale.step.losses import Losses, non_finite_losses
from megascale.step.member import StepMember
from megascale.step.misuse import Statistics, was_skipped
from megascale.step.observers import SeenGrads, StepObserver, StepRecord
from megascale.step.overflow_report import OverflowEntry, OverflowReport, OwnOverflows, holds_only_nan, merged
from megascale.utils.collectives import all_gather_object, group_size
from megascale.utils.dtensors import to_local
from megascale.utils.graph_capture import is_capturing

Entries = tuple[OverflowEntry, ...]


class OverflowListener(Protocol):
    """Sees gradients in backward, and is told of skipped steps: :class:`megascale.debug.reporting.OverflowReporter`."""

    def take(self) -> SeenGrads:
        """Return what was seen of gradients since the last call, without waiting for the device."""

    def on_skip(self) -> None:
        """Learn that a step was skipped. Called on every rank alike; it may communicate."""

    def attach(self, recorder: "OverflowRecorder") -> None:
        """Listen to ``recorder`` from here on, and observe the gradients of its parameters."""


class LastOverflow:
    """What is known of the last skipped step. Base of what records the steps of an optimizer or of a GradScaler.

    Attributes:
        listener: sees gradients in backward, and is told, on every rank alike, once the host knows that a step was
            skipped; None: nobody is.
        group: the ranks that skip together.
        losses: that were scaled since the last step.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.losses = Losses()
        self.listener: OverflowListener | None = None
        self.group = group
        self._own: OwnOverflows | None = None  # what this rank knows
        self._report: OverflowReport | None = None  # of all ranks, once it was asked for

    def last_known(self, *, gather: bool) -> OverflowReport | None:
        """Return the report of the last skipped step that the host knows of, without waiting for the device.

        ``gather``: report on all ranks; then all of them must make the call.
        """
        if gather and self._report is None:
            ranks = [one for one in all_gather_object(self._own, self.group) if one is not None]
            self._report = merged(ranks) if ranks else None
        return self._report or (None if self._own is None else self._own.report())


class OverflowRecorder(LastOverflow, StepObserver):
    """Records the last skipped step of a recipe."""

    def __init__(self, members: Sequence[StepMember], groups: ParallelGroups, device: torch.device) -> None:
        super().__init__(groups.grad_stats)
        self._num_records = 0
        self._members = list(members)
        self._device = device
        self._on_host = device.type == "cpu"
        self._newest: StepRecord | None = None
        self._skipped: StepRecord | None = None
        self._own_serial = 0  # of the record that `_own` describes

    # In a step

    def record(
        self, collected: Sequence[Collected], stats: GradStats, found_inf: Tensor, scaler: MegatronGradScaler | None
    ) -> StepRecord:
        """Return the record of a step that was decided on, before its loss scale changes.

        Args:
            collected: this step's gradients, of each member.
            stats: agreed; the counts are this rank's.
            found_inf: the decision's.
            scaler: of the loss.
        """
        self._num_records += 1
        # Taken at the decision: observers may be told one step later, when the next losses are there.
        num_losses, losses = self.losses.count, self.losses.take()
        captured = is_capturing(self._device)
        params = []
        for own in collected:
            params.append(own.params)
        return StepRecord(
            self._num_records,
            None if captured else self._members[0].counter.taken,
            params,
            stats.non_finite,
            stats.sum_squares,
            stats.vector,
            found_inf,
            scaler,
            self._scale_of(scaler),
            0 if num_losses == 1 else None,
            None if self.listener is None else self.listener.take(),
            non_finite_module.take(self._params),
            None if captured else losses,  # a replay's may be others
        )

    def on_step(self, agreed: Statistics | None, record: StepRecord) -> None:
        """Keep the record of the step that the host now knows of, if it was skipped."""
        reported, self._newest = self.record_of_statistics(record), record
        if agreed is not None and reported is not None and was_skipped(agreed):
            self._keep(reported)

    def record_of_statistics(self, newest: StepRecord) -> StepRecord | None:
        """Return the record of the step whose statistics the host has while ``newest`` is recorded.

        On a CPU they are those of ``newest``; on an accelerator, whose host reads one step late, those of the step
        before it: None in the first step. Call it before :meth:`on_step`.
        """
        return newest if self._on_host else self._newest

    @property
    def newest(self) -> StepRecord:
        """What is kept of the newest step. Raises LookupError before the first."""
        if self._newest is None:
            raise LookupError("no step yet")
        return self._newest

    def _scale_of(self, scaler: MegatronGradScaler | None) -> Tensor | float | None:
        """Return the scale. On an accelerator it must be copied before it changes: only if there is a listener."""
        if scaler is None:
            return 1.0
        if self._on_host:
            return scaler.live_scale
        return None if self.listener is None else scaler.live_scale.clone()

    def _keep(self, record: StepRecord) -> None:
        """Keep a skipped step, and describe it to the listener."""
        self._skipped = replace(record, scale=_on_host(record.scale)) if self._on_host else record
        if self.listener is not None:
            self._read(self._skipped, grads_are_there=self._on_host)
            self.listener.on_skip()

    # Asked by the host

    def last(self, *, gather: bool) -> OverflowReport | None:
        """Return the report of the last skipped step, None before the first. Waits for the device.

        ``gather``: report on all ranks; then all of them must make the call.
        """
        newest, skipped = self._newest, self._skipped
        if newest is not None and was_skipped(newest.vector.tolist()):
            kept = skipped if skipped is not None and skipped.serial == newest.serial else newest
            self._read(kept, grads_are_there=True)
        elif skipped is not None:
            self._read(skipped, grads_are_there=False)
        return self.last_known(gather=gather)

    def _read(self, record: StepRecord, *, grads_are_there: bool) -> None:
        """Describe a skipped step, unless that was done before. A step in a graph is described at each call."""
        if record.serial == self._own_serial and record.step is not None:
            return
        self._own_serial, self._report, self._skipped = record.serial, None, None
        step = self._members[0].counter.taken - 1 if record.step is None else record.step
        entries = self._entries(record, grads_are_there)
        seen = None if record.seen is None else record.seen()
        if seen is None and group_size(self.group) == 1:
            seen = entries  # a single rank's gradients are never reduced
        module = non_finite_module.first_of(record.modules)
        losses = non_finite_losses(record.losses, own_rank())
        only_nan = record.counts is not None and holds_only_nan(entries, record.counts.numel())
        self._own = OwnOverflows(step, _on_host(record.scale), seen, entries, module, losses, only_nan)

    def _entries(self, record: StepRecord, grads_are_there: bool) -> Entries:
        """Return the gradients of the step that were not finite."""
        if record.counts is None:
            return ()
        params = [(member, param) for member, own in zip(self._members, record.params, strict=True) for param in own]
        found = [
            (member, param, int(count))
            for (member, param), count in zip(params, record.counts.tolist(), strict=True)
            if count
        ]
        indices = {id(param): index for index, (_, param) in enumerate(self.named_params())}
        entries = []
        for member, param, count in found:
            numel = to_local(param.main).numel()
            index = indices[id(param.model)]
            grad = member.grads.grad_of(param) if grads_are_there else None
            entry = None if grad is None else described(param.name, grad, index, record.micro_batch, numel)
            if entry is None or entry.num_non_finite != count:  # it is gone, or a newer one is there
                entry = OverflowEntry(param.name, own_rank(), record.micro_batch, None, None, count, numel, None, index)
            entries.append(entry)
        return tuple(entries)

    def named_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all members, in their order, and their names."""
        return ((param.name, param.model) for member in self._members for param in member.main_params)

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for _, param in self.named_params())


def _on_host(scale: Tensor | float | None) -> float | None:
    return float(scale.tolist()[0]) if isinstance(scale, Tensor) else scale


def described(name: str, grad: Tensor, index: int, micro_batch: int | None, numel: int) -> OverflowEntry:
    """Return the entry of one of this rank's gradients. Arguments: see :class:`OverflowEntry`."""
    num_inf, num_nan, largest = describe_non_finite(grad).tolist()
    kinds = int(num_inf), int(num_nan)
    return OverflowEntry(name, own_rank(), micro_batch, *kinds, sum(kinds), numel, largest, index)


def own_rank() -> int:
    """Return this process's global rank."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
