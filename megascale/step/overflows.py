"""OverflowRecorder: keeps what a report of the last skipped step needs.

A step only keeps references to what it has computed anyway, such as the count of non-finite elements of each gradient:
no further pass, message or wait. Gradients themselves are read when a report is asked for while they still exist. With
a listener, a skipped step is described as soon as the host knows of it: at once on a CPU, one step late on an
accelerator, when its gradients are gone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from megascale.grad_scaler import MegatronGradScaler
from megascale.parallel import ParallelGroups
from megascale.step.grad_stats import GradStats
from megascale.step.local_grads import Collected
from megascale.step.member import StepMember
from megascale.step.misuse import was_skipped
from megascale.step.overflow_report import (
    Entries,
    NonFiniteLoss,
    OverflowEntry,
    OverflowReport,
    first_module,
    in_order,
    merged,
)
from megascale.step.result import BetweenSteps, SeenGrads, SeenModule, StepRecord
from megascale.utils.collectives import all_gather_object, group_size
from megascale.utils.dtensors import to_local

MOST_LOSSES = 1024
"""Of more losses between two steps nothing is known: a loop that never steps must not fill the memory."""


class Losses:
    """References to the losses since the last step. No copy and no read: each is one tensor without its graph.

    Attributes:
        count: how many there were; a list of losses, of which nothing is known, counts as too many.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kept: list[Tensor] = []

    def add(self, loss: Any) -> None:
        """Keep a loss, not scaled, of any shape and floating-point dtype."""
        self.count += 1 if isinstance(loss, Tensor) else MOST_LOSSES + 1
        if self.count <= MOST_LOSSES:
            self._kept.append(loss.detach())

    def take(self) -> list[Tensor] | None:
        """Return the losses since the last call; None where there was none, or not all of them were kept."""
        kept = self._kept if 0 < self.count <= MOST_LOSSES else None
        self.count, self._kept = 0, []
        return kept


def non_finite_losses(losses: Sequence[Tensor] | None, rank: int) -> tuple[NonFiniteLoss, ...] | None:
    """Return those that are inf or NaN, in their order; None where ``losses`` is None. Waits for the device."""
    if losses is None:
        return None
    found = []
    for index, loss in enumerate(losses):
        values = to_local(loss).flatten()
        bad = values[~torch.isfinite(values)][:1].tolist()
        found += [NonFiniteLoss(rank, index, float(value)) for value in bad]
    return tuple(found)


class WatchedModules(Protocol):
    """A watch of a model's modules: :class:`megascale.debug.modules.ModuleWatch`."""

    def has_param_of(self, ids: set[int]) -> bool:
        """Return whether the model has a parameter with one of these ids."""

    def take(self) -> SeenModule:
        """Return what was seen since the last call, without waiting for the device."""


LIVE: WeakKeyDictionary[WatchedModules, None] = WeakKeyDictionary()
"""Watches, oldest first: steps of optimizers of the watched model's parameters take what they see."""


class OverflowListener(Protocol):
    """Sees gradients in backward, and is told of skipped steps: :class:`megascale.debug.reporting.OverflowReporter`."""

    def take(self) -> SeenGrads:
        """Return what was seen of gradients since the last call, without waiting for the device."""

    def on_skip(self) -> None:
        """Learn that a step was skipped. Called on every rank alike; it may communicate."""


class LastOverflow(ABC):
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
        self._own: OverflowReport | None = None  # what this rank knows
        self._report: OverflowReport | None = None  # of all ranks, once it was asked for

    @property
    def _may_be_reduced(self) -> bool:
        """Whether gradients may be sums over ranks of which this one does not know."""
        return False

    def _take_seen(self, params: Callable[[], Iterable[Tensor]]) -> BetweenSteps:
        """Return what was seen since the last call. ``params``: returns those that are trained; asked rarely."""
        micro_batch = 0 if self.losses.count == 1 else None
        grads = None if self.listener is None else self.listener.take()
        modules: list[SeenModule] = []
        if LIVE:
            ids = {id(param) for param in params()}
            modules = [watch.take() for watch in LIVE if watch.has_param_of(ids)]
        return BetweenSteps(grads, modules, self.losses.take(), micro_batch)

    def _tell(self, step: int, scale: float | None, seen: BetweenSteps, at_the_step: Entries) -> None:
        """Describe a skipped step. Waits for the device."""
        early = None if seen.grads is None else seen.grads()
        if early is None and group_size(self.group) == 1 and not self._may_be_reduced:
            early = at_the_step  # a single rank's gradients are never reduced
        losses = non_finite_losses(seen.losses, own_rank())
        self._own = OverflowReport(
            step,
            scale,
            in_order(at_the_step if early is None else early),
            before_reduction=early is not None,
            module=first_module(first() for first in seen.modules),
            losses=None if self._may_be_reduced and not losses else losses,
            at_the_step=at_the_step,
        )
        self._report = None

    def last_known(self, *, gather: bool) -> OverflowReport | None:
        """Return the report of the last skipped step that the host knows of, without waiting for the device.

        ``gather``: report on all ranks; then all of them must make the call.
        """
        if gather and self._report is None:
            ranks = [one for one in all_gather_object(self._own, self.group) if one is not None]
            self._report = merged(ranks) if ranks else None
        return self._report or self._own

    @abstractmethod
    def last(self, *, gather: bool) -> OverflowReport | None:
        """Return the report of the last skipped step, None before the first. Waits for the device.

        ``gather``: report on all ranks; then all of them must make the call.
        """

    def worst(self) -> str:
        """Return the end of an error message that names the worst parameters, on every rank alike."""
        report = self.last(gather=True)
        return "" if report is None else report.worst()


class OverflowRecorder(LastOverflow):
    """Records the last skipped step of a recipe.

    Attributes:
        newest: what is kept of the newest step; None before the first. Set once nobody has refused the step.
    """

    def __init__(self, members: Sequence[StepMember], groups: ParallelGroups) -> None:
        super().__init__(groups.grad_stats)
        self._members = list(members)
        self._on_host = members[0].device.type == "cpu"
        self.newest: StepRecord | None = None
        self._skipped: StepRecord | None = None  # known, and not told yet
        self._told: StepRecord | None = None  # the record that `_own` describes

    # In a step

    def record(
        self,
        collected: Sequence[Collected],
        stats: GradStats,
        found_inf: Tensor,
        scaler: MegatronGradScaler | None,
        *,
        capturing: bool,
    ) -> StepRecord:
        """Return the record of a step that was decided on, before its loss scale changes.

        Args:
            collected: this step's gradients, of each member.
            stats: agreed; the counts are this rank's.
            found_inf: the decision's.
            scaler: of the loss.
            capturing: whether a graph is captured, which will replay the step.
        """
        # Taken at the decision: observers may be told one step later, when the next losses are there.
        seen = self._take_seen(lambda: (param for _, param in self.named_params()))
        # The scale before it changes. On an accelerator it must be copied: only if there is a listener.
        scale: Tensor | float | None = 1.0
        if scaler is not None:
            live = scaler.live_scale
            scale = live.tolist()[0] if self._on_host else None if self.listener is None else live.clone()
        return StepRecord(
            None if capturing else self._members[0].counter.taken,
            list(map(attrgetter("params"), collected)),
            list(map(attrgetter("weights"), collected)),
            stats.non_finite,
            stats.sum_squares,
            stats.vector,
            found_inf,
            scaler,
            scale,
            seen._replace(losses=None) if capturing else seen,  # a replay's losses may be others
        )

    def on_skip(self, record: StepRecord) -> None:
        """Keep the record of an overflow that the host now knows of, and describe it to a listener."""
        self._skipped = record
        if self.listener is not None:
            self._read(record, grads_are_there=self._on_host)
            self.listener.on_skip()

    # Asked by the host

    @override
    def last(self, *, gather: bool) -> OverflowReport | None:
        if self.newest is not None and was_skipped(self.newest.vector.tolist()):
            self._read(self.newest, grads_are_there=True)
        elif self._skipped is not None:
            self._read(self._skipped, grads_are_there=False)
        return self.last_known(gather=gather)

    def _read(self, record: StepRecord, *, grads_are_there: bool) -> None:
        """Describe a skipped step, unless that was done before. A step in a graph is described at each call."""
        if record is self._told and record.step is not None:
            return
        self._told, self._skipped = record, None
        self._tell(
            self._members[0].counter.taken - 1 if record.step is None else record.step,
            float(record.scale.tolist()[0]) if isinstance(record.scale, Tensor) else record.scale,
            record.seen,
            tuple(self._entries(record, grads_are_there)),
        )

    def _entries(self, record: StepRecord, grads_are_there: bool) -> Iterator[OverflowEntry]:
        """Yield the gradients of the step that were not finite."""
        if record.counts is None:
            return
        params = [(member, param) for member, own in zip(self._members, record.params, strict=True) for param in own]
        indices = {id(param): index for index, (_, param) in enumerate(self.named_params())}
        for (member, param), counted in zip(params, record.counts.tolist(), strict=True):
            if not counted:
                continue
            count, index, numel = int(counted), indices[id(param.model)], to_local(param.main).numel()
            grad = member.grads.grad_of(param) if grads_are_there else None
            if grad is not None:
                entry = described(param.name, describe_non_finite(grad), index, record.seen.micro_batch, numel)
                if entry.num_non_finite == count:  # else a newer gradient is there
                    yield entry
                    continue
            yield OverflowEntry(param.name, own_rank(), record.seen.micro_batch, None, None, count, numel, None, index)

    def named_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all members, in their order, and their names."""
        return ((param.name, param.model) for member in self._members for param in member.main_params)


@torch.no_grad()
def describe_non_finite(tensor: Tensor) -> Tensor:
    """Return (elements that are inf, elements that are NaN, largest finite magnitude): fp64, shape [3].

    On the tensor's device, without a host sync. The magnitude is 0 where no element is finite. It reads the tensor
    several times: for tensors that overflowed.
    """
    size = tensor.abs()
    num_inf, num_nan = (size == torch.inf).sum(dtype=torch.float64), (size != size).sum(dtype=torch.float64)
    finite = torch.nan_to_num(size, nan=0.0, posinf=0.0)
    largest = finite.amax() if tensor.numel() else finite.new_zeros(())
    return torch.stack([num_inf, num_nan, largest.to(torch.float64)])


def described(name: str, numbers: Tensor, index: int, micro_batch: int | None, numel: int) -> OverflowEntry:
    """Return the entry of one of this rank's gradients. Waits for the device. Arguments: see :class:`OverflowEntry`.

    ``numbers``: those of :func:`describe_non_finite`.
    """
    num_inf, num_nan, largest = numbers.tolist()
    kinds = int(num_inf), int(num_nan)
    return OverflowEntry(name, own_rank(), micro_batch, *kinds, sum(kinds), numel, largest, index)


def own_rank() -> int:
    """Return this process's global rank."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
