"""OverflowReport: which parameters' gradients made a step skip, on which rank, and how."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megascale.errors import MOST_NAMES
from megascale.step.non_finite_module import NonFiniteModule

COLUMNS = ("parameter", "rank", "micro-batch", "non-finite", "of", "largest finite")
MOST_ROWS = 32
"""A printed report shows at most so many entries. The origin is always among them."""


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
    """

    step: int
    scale: float | None
    entries: tuple[OverflowEntry, ...]
    before_reduction: bool = False
    all_ranks: bool = False
    module: NonFiniteModule | None = None

    @property
    def origin(self) -> OverflowEntry | None:
        """The likely origin: the last entry in the order of forward, because backward carries inf and NaN to the input.

        Of several micro-batches the first counts. The order is taken to be that of the parameters;
        :func:`megascale.debug.watch` learns the true one.
        """

        def rank_of(entry: OverflowEntry) -> tuple[int, int]:
            return (-(entry.micro_batch or 0), entry.index)

        return max(self.entries, key=rank_of, default=None)

    def worst(self) -> str:
        """Return the end of an error message: the parameters with most non-finite elements, each on its worst rank."""
        found: dict[str, OverflowEntry] = {}
        for entry in sorted(self.entries, key=lambda one: -one.num_non_finite):
            found.setdefault(entry.parameter, entry)
        shown = ", ".join(_counted(entry) for entry in list(found.values())[:MOST_NAMES])
        return f"; most inf or NaN: {shown}" if shown else ""

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dict of JSON's types for each entry."""
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
        lines = [f"{head}: {count} parameter{'s' if count > 1 else ''} with non-finite gradients"]
        origin = self.origin
        shown = list(self.entries[:MOST_ROWS])
        if origin not in shown:
            shown[-1:] = filter(None, [origin])
        lines += _table(shown, origin)
        if len(self.entries) > len(shown):
            lines.append(f"and {len(self.entries) - len(shown)} more")
        if not self.before_reduction:
            lines.append("(ranks: of gradients as they were at the step; report_overflows() tells where they arose)")
        return "\n".join(lines + ends)

    def _why_empty(self) -> str:
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
        module: see :class:`OverflowReport`.
    """

    step: int
    scale: float | None
    before_reduction: tuple[OverflowEntry, ...] | None
    at_the_step: tuple[OverflowEntry, ...]
    module: NonFiniteModule | None = None

    def report(self) -> OverflowReport:
        """Return what this rank can tell alone."""
        if self.before_reduction is None:
            return OverflowReport(self.step, self.scale, in_order(self.at_the_step), module=self.module)
        entries = in_order(self.before_reduction)
        return OverflowReport(self.step, self.scale, entries, before_reduction=True, module=self.module)


def merged(ranks: Sequence[OwnOverflows]) -> OverflowReport:
    """Return what all ranks know of one step.

    Entries from before the reduction are taken if any rank has one. Otherwise those of the gradients that the step was
    given: an overflow may arise in the sum over ranks. An entry that all ranks have becomes one, of rank None.
    """
    scale = next((rank.scale for rank in ranks if rank.scale is not None), None)
    modules = [rank.module for rank in ranks if rank.module is not None]
    module = min(modules, key=lambda one: one.order, default=None)
    own = [entry for rank in ranks for entry in rank.before_reduction or ()]
    if own:
        return OverflowReport(ranks[0].step, scale, in_order(own), before_reduction=True, all_ranks=True, module=module)
    entries = [entry for rank in ranks for entry in rank.at_the_step]
    counts = Counter(replace(entry, rank=None) for entry in entries)
    shared = [entry for entry, count in counts.items() if count == len(ranks) > 1]
    rest = [entry for entry in entries if replace(entry, rank=None) not in shared]
    return OverflowReport(ranks[0].step, scale, in_order([*shared, *rest]), all_ranks=True, module=module)


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
