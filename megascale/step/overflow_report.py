"""OverflowReport: which parameters' gradients made a step skip, on which rank, and how."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from megascale.errors import MOST_NAMES
from megascale.step.losses import NonFiniteLoss
from megascale.step.non_finite_module import NonFiniteModule

COLUMNS = ("parameter", "rank", "micro-batch", "non-finite", "of", "largest finite")
MOST_ROWS = 32
"""A printed report shows at most so many entries. The origin is always among them."""


class OverflowRow(TypedDict):
    """One gradient of a skipped step, in JSON's types: :class:`OverflowEntry` beside what its report knows."""

    step: int
    scale: float | None
    rank: int | None
    parameter: str
    kind: str | None
    num_inf: int | None
    num_nan: int | None
    numel: int
    largest_finite: float | None
    micro_batch: int | None
    origin: bool
    loss_finite: bool | None
    module: str | None
    module_phase: str | None
    module_rank: int | None


@dataclass(frozen=True)
class OverflowEntry:
    """The non-finite elements of one gradient.

    Attributes:
        parameter: its name.
        rank: the global rank that has them. None: every rank has the same, as after an all-reduce.
        micro_batch: in which of a step's backward passes they arose, from 0; None: unknown.
        kind: "inf", "nan" or "inf and nan"; None: unknown, because the gradient was gone when the host learnt of it.
        num_inf, num_nan: how many elements; None: unknown.
        num_non_finite: their sum.
        numel: elements of the gradient, or of the part that the rank keeps.
        largest_finite: largest magnitude of the finite elements, still scaled; 0 if there are none; None: unknown.
        index: the parameter's position in the forward pass, or in the optimizer where that is not known.
    """

    parameter: str
    rank: int | None
    micro_batch: int | None
    num_inf: int | None
    num_nan: int | None
    num_non_finite: int
    numel: int
    largest_finite: float | None
    index: int

    @property
    def kind(self) -> str | None:
        """See the class."""
        if self.num_inf is None or self.num_nan is None:
            return None
        return " and ".join(name for name, count in (("inf", self.num_inf), ("nan", self.num_nan)) if count)


@dataclass(frozen=True)
class OverflowReport:
    """What is known of one skipped step.

    Attributes:
        step: which one, from 0, as the optimizer counts: skipped steps count, and those before a load too.
        scale: the loss scale that its gradients have; None: no longer known.
        entries: of the gradients that held inf or NaN, in the order of the parameters. Empty if this rank had none, or
            if all elements were finite and the sum of their squares was not.
        before_reduction: whether ranks are those on which gradients overflowed, before any reduction. Otherwise those
            that hold the reduced gradient.
        all_ranks: whether the entries are those of all ranks.
        module: in which inf or NaN appeared first, while :func:`megascale.debug.watch` watched the model; else None.
        losses: those that ``scale_loss()`` was given in this step, and that were inf or NaN: of all ranks where
            ``all_ranks``, else of this one. None: unknown, because the loss was scaled in another way.
        only_nan: whether each gradient of the step held NaN, and none inf.
    """

    step: int
    scale: float | None
    entries: tuple[OverflowEntry, ...]
    before_reduction: bool = False
    all_ranks: bool = False
    module: NonFiniteModule | None = None
    losses: tuple[NonFiniteLoss, ...] | None = None
    only_nan: bool = False

    @property
    def loss_was_finite(self) -> bool | None:
        """True: the overflow began in backward, before any loss was inf or NaN. False: a loss was. None: unknown.

        One rank's finite losses tell nothing of gradients that were reduced over ranks.
        """
        if self.losses:
            return self._began_before(self.losses)
        return True if self.losses is not None and (self.before_reduction or self.all_ranks) else None

    def _began_before(self, losses: Sequence[NonFiniteLoss]) -> bool:
        """Whether gradients held inf or NaN in an earlier micro-batch than that of the first of these losses."""
        first = min(loss.micro_batch for loss in losses)
        return any(entry.micro_batch is not None and entry.micro_batch < first for entry in self.entries)

    @property
    def origin(self) -> OverflowEntry | None:
        """The likely origin: the last entry in the order of forward, because backward carries inf and NaN to the input.

        None where the loss itself was not finite, as known or as gradients of nothing but NaN tell: forward made it,
        and backward has spread it to every parameter. Of several micro-batches the first counts. The order is taken to
        be that of the parameters; :func:`megascale.debug.watch` learns the true one.
        """
        return None if self._blames_loss else self._last_in_forward

    @property
    def _last_in_forward(self) -> OverflowEntry | None:
        def rank_of(entry: OverflowEntry) -> tuple[int, int]:
            return (-(entry.micro_batch or 0), entry.index)

        return max(self.entries, key=rank_of, default=None)

    @property
    def _blames_loss(self) -> bool:
        """Whether the loss was not finite, or nobody knows it and all gradients look like that."""
        last = self._last_in_forward
        if self.loss_was_finite is not None:
            return not self.loss_was_finite
        return self.only_nan and last is not None and last.num_nan == last.numel

    @property
    def cause(self) -> str:
        """What is known of the loss, as the end of a sentence; empty if that is nothing."""
        if self.losses and not self.loss_was_finite:
            more = f" (and {len(self.losses) - 1} more)" if len(self.losses) > 1 else ""
            return f"the loss was {self.losses[0]}{more}, so forward made it{self._search}"
        if self._blames_loss:
            return f"all of them hold NaN, so the loss itself was probably inf or NaN{self._search}"
        return "the loss was finite" if self.loss_was_finite else ""

    @property
    def _search(self) -> str:
        return "" if self.module is not None else "; megascale.debug.watch(model) names the module"

    def worst(self) -> str:
        """Return the end of an error message: the parameters with most non-finite elements, each on its worst rank.

        Where the loss was not finite, that: the parameters are innocent.
        """
        if self._blames_loss:
            return f"; {self.cause}"
        found: dict[str, OverflowEntry] = {}
        for entry in sorted(self.entries, key=lambda one: -one.num_non_finite):
            found.setdefault(entry.parameter, entry)
        shown = ", ".join(_counted(entry) for entry in list(found.values())[:MOST_NAMES])
        return f"; most inf or NaN: {shown}" if shown else ""

    def rows(self) -> list[OverflowRow]:
        """Return one row of JSON's types for each entry."""
        origin = self.origin
        return [
            {
                "step": self.step,
                "scale": self.scale,
                "rank": entry.rank,
                "parameter": entry.parameter,
                "kind": entry.kind,
                "num_inf": entry.num_inf,
                "num_nan": entry.num_nan,
                "numel": entry.numel,
                "largest_finite": entry.largest_finite,
                "micro_batch": entry.micro_batch,
                "origin": entry is origin,
                "loss_finite": self.loss_was_finite,
                "module": None if self.module is None else self.module.module,
                "module_phase": None if self.module is None else self.module.phase,
                "module_rank": None if self.module is None else self.module.rank,
            }
            for entry in self.entries
        ]

    def __str__(self) -> str:
        scale = "unknown" if self.scale is None else f"{self.scale:g}"
        head = f"step {self.step} was skipped at scale {scale}"
        ends = [] if self.module is None else [f"first on rank {self.module.rank}: {self.module}"]
        if not self.entries:
            return "\n".join([f"{head}: {self._why_empty()}", *ends])
        count = len({entry.parameter for entry in self.entries})
        cause = f"{', ' if self.loss_was_finite else '; '}{self.cause}" if self.cause else ""
        lines = [f"{head}: {count} parameter{'s' if count > 1 else ''} with non-finite gradients{cause}"]
        origin = self.origin
        shown = list(self.entries[:MOST_ROWS])
        if origin is not None and origin not in shown:
            shown[-1] = origin
        lines += _table(shown, origin)
        if len(self.entries) > len(shown):
            lines.append(f"and {len(self.entries) - len(shown)} more")
        if not self.before_reduction:
            lines.append("(ranks: of gradients as they were at the step; report_overflows() tells where they arose)")
        return "\n".join(lines + ends)

    def _why_empty(self) -> str:
        if self.losses:
            return self.cause
        if self.all_ranks:
            return "all elements of the gradients are finite, the sum of their squares is beyond fp32"
        return "no gradient of this rank held inf or NaN; last_overflow(gather=True), on every rank, tells of all"


@dataclass(frozen=True)
class OwnOverflows:
    """What one rank knows of a skipped step.

    Attributes:
        step, scale: see :class:`OverflowReport`.
        before_reduction: entries of the gradients that its own backward made; None: nobody looked at them.
        at_the_step: entries of the gradients that the step was given.
        module, losses, only_nan: see :class:`OverflowReport`; of this rank.
    """

    step: int
    scale: float | None
    before_reduction: tuple[OverflowEntry, ...] | None
    at_the_step: tuple[OverflowEntry, ...]
    module: NonFiniteModule | None = None
    losses: tuple[NonFiniteLoss, ...] | None = None
    only_nan: bool = False

    def report(self) -> OverflowReport:
        """Return what this rank can tell alone."""
        is_early = self.before_reduction is not None
        entries = in_order(self.at_the_step if self.before_reduction is None else self.before_reduction)
        return OverflowReport(
            self.step, self.scale, entries, is_early, module=self.module, losses=self.losses, only_nan=self.only_nan
        )


def merged(ranks: Sequence[OwnOverflows]) -> OverflowReport:
    """Return what all ranks know of one step.

    Entries from before the reduction are taken if any rank has one. Otherwise those of the gradients that the step was
    given: an overflow may arise in the sum over ranks. An entry that all ranks have becomes one, of rank None.
    """
    scale = next((rank.scale for rank in ranks if rank.scale is not None), None)
    modules = [rank.module for rank in ranks if rank.module is not None]
    module = min(modules, key=lambda one: one.order, default=None)
    found: dict[str, Any] = {"all_ranks": True, "module": module, "losses": _merged_losses(ranks)}
    found["only_nan"] = all(rank.only_nan for rank in ranks)
    own = [entry for rank in ranks for entry in rank.before_reduction or ()]
    if own:
        return OverflowReport(ranks[0].step, scale, in_order(own), before_reduction=True, **found)
    entries = [entry for rank in ranks for entry in rank.at_the_step]
    counts = Counter(replace(entry, rank=None) for entry in entries)
    shared = [entry for entry, count in counts.items() if count == len(ranks) > 1]
    rest = [entry for entry in entries if replace(entry, rank=None) not in shared]
    return OverflowReport(ranks[0].step, scale, in_order([*shared, *rest]), **found)


def _merged_losses(ranks: Sequence[OwnOverflows]) -> tuple[NonFiniteLoss, ...] | None:
    """Return all ranks' losses that were not finite. One rank's unknown losses make all unknown, if there is none."""
    bad = tuple(loss for rank in ranks for loss in rank.losses or ())
    return None if not bad and any(rank.losses is None for rank in ranks) else bad


def holds_only_nan(entries: Sequence[OverflowEntry], num_grads: int) -> bool:
    """Return whether each of ``num_grads`` gradients has an entry, with NaN and without inf."""
    return 0 < num_grads == len(entries) and all(one.num_nan and one.num_inf == 0 for one in entries)


def in_order(entries: Iterable[OverflowEntry]) -> tuple[OverflowEntry, ...]:
    """Return entries by parameter, micro-batch and rank."""
    return tuple(
        sorted(entries, key=lambda one: (one.index, one.micro_batch or 0, -1 if one.rank is None else one.rank))
    )


def _counted(entry: OverflowEntry) -> str:
    where = "all ranks" if entry.rank is None else f"rank {entry.rank}"
    return f"{entry.parameter!r} ({entry.num_non_finite} of {entry.numel} elements, {where})"


def _table(entries: Sequence[OverflowEntry], origin: OverflowEntry | None) -> list[str]:
    rows = [COLUMNS, *(_cells(entry, entry is origin) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(entry: OverflowEntry, is_origin: bool) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "?" if value is None else f"{value:g}"

    counts = ((entry.num_inf, "inf"), (entry.num_nan, "nan"))
    return (
        entry.parameter + (" <- likely origin" if is_origin else ""),
        "all" if entry.rank is None else str(entry.rank),
        shown(entry.micro_batch),
        " and ".join(f"{count} {name}" for count, name in counts if count) or f"{entry.num_non_finite} inf or nan",
        str(entry.numel),
        shown(entry.largest_finite),
    )
