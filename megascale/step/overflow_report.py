"""OverflowReport: which parameters' gradients made a step skip, on which rank, and how; and what it is made of."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megascale.errors import MOST_NAMES

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

    @property
    def where(self) -> str:
        """The rank, in words."""
        return "all ranks" if self.rank is None else f"rank {self.rank}"


Entries = tuple[OverflowEntry, ...]


@dataclass(frozen=True)
class NonFiniteLoss:
    """A loss that was inf or NaN when ``scale_loss()`` was given it.

    Attributes:
        rank: the global rank that computed it.
        micro_batch: the how many-eth loss of the step it was, from 0.
        value: inf, -inf or NaN.
    """

    rank: int
    micro_batch: int
    value: float

    def __str__(self) -> str:
        return f"{self.value} on rank {self.rank} in micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a module's inputs, or of its outputs, over all their floating-point tensors.

    Attributes:
        minimum, maximum, mean_abs: of the finite elements; 0 without any.
        share_non_finite: inf and NaN among all elements.
        dtype: of the first tensor.
    """

    minimum: float
    maximum: float
    mean_abs: float
    share_non_finite: float
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')} between {self.minimum:g} and {self.maximum:g}, mean magnitude "
            f"{self.mean_abs:g}, {self.share_non_finite:.3%} not finite"
        )


@dataclass(frozen=True)
class NonFiniteModule:
    """Where inf or NaN appeared first.

    Attributes:
        module: its name in the model; the model itself has its class's name.
        phase: "forward": its output was not finite. "backward": the gradient of its output was not, which the modules
            after it in forward have computed.
        call: which of the module's calls, from 0, since the watch was made or cleared.
        inputs: of the module, in that call.
        found: of its output, or of its output's gradient.
        rank: global, of the process that saw it.
    """

    module: str
    phase: str
    call: int
    inputs: TensorStatistics
    found: TensorStatistics
    rank: int = 0

    def __str__(self) -> str:
        what = "output" if self.phase == "forward" else "gradient of the output"
        return f"{what} of {self.module!r} (call {self.call}): {self.found}; inputs: {self.inputs}"


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
        at_the_step: of this rank, where it tells of gradients before the reduction: entries of those that the step got.
    """

    step: int
    scale: float | None
    entries: Entries
    before_reduction: bool = False
    all_ranks: bool = False
    module: NonFiniteModule | None = None
    losses: tuple[NonFiniteLoss, ...] | None = None
    at_the_step: Entries = ()

    @property
    def loss_was_finite(self) -> bool | None:
        """True: the overflow began in backward, before any loss was inf or NaN. False: a loss was. None: unknown.

        One rank's finite losses tell nothing of gradients that were reduced over ranks.
        """
        if self.losses:
            first = min(loss.micro_batch for loss in self.losses)
            return any(entry.micro_batch is not None and entry.micro_batch < first for entry in self.entries)
        return True if self.losses is not None and (self.before_reduction or self.all_ranks) else None

    @property
    def origin(self) -> OverflowEntry | None:
        """The likely origin: the last entry in the order of forward, because backward carries inf and NaN to the input.

        None where the loss itself was not finite: forward made it, and backward has spread it to every parameter. Of
        several micro-batches the first counts. The order is taken to be that of the parameters;
        :func:`megascale.debug.watch` learns the true one.
        """
        if self.loss_was_finite is False:
            return None
        return max(self.entries, key=lambda entry: (-(entry.micro_batch or 0), entry.index), default=None)

    @property
    def cause(self) -> str:
        """What is known of the loss, as the end of a sentence; empty if that is nothing."""
        if not self.losses or self.loss_was_finite is not False:
            return "the loss was finite" if self.loss_was_finite else ""
        watched = (
            "megascale.debug.watch(model) names the module, last_overflow(gather=True) on every rank also another's"
        )
        search = "" if self.module is not None else f"; {watched}"
        more = f" (and {len(self.losses) - 1} more)" if len(self.losses) > 1 else ""
        return f"the loss was {self.losses[0]}{more}, so forward made it{search}"

    def worst(self) -> str:
        """Return the end of an error message: the parameters with most non-finite elements, each on its worst rank.

        Where the loss was not finite, that: the parameters are innocent.
        """
        if self.loss_was_finite is False:
            return f"; {self.cause}"
        found: dict[str, str] = {}
        for entry in sorted(self.entries, key=lambda one: -one.num_non_finite):
            counted = f"({entry.num_non_finite} of {entry.numel} elements, {entry.where})"
            found.setdefault(entry.parameter, f"{entry.parameter!r} {counted}")
        return f"; most inf or NaN: {', '.join(list(found.values())[:MOST_NAMES])}" if found else ""

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict of JSON's types for each entry; :func:`megascale.debug.report_overflows` has its keys."""
        origin, module = self.origin, self.module
        of_entry = ("rank", "parameter", "kind", "num_inf", "num_nan", "numel", "largest_finite", "micro_batch")
        of_module = {"module": "module", "module_phase": "phase", "module_rank": "rank"}
        return [
            {"step": self.step, "scale": self.scale}
            | {key: getattr(entry, key) for key in of_entry}
            | {"origin": entry is origin, "loss_finite": self.loss_was_finite}
            | {key: getattr(module, name, None) for key, name in of_module.items()}
            for entry in self.entries
        ]

    def __str__(self) -> str:
        scale = "unknown" if self.scale is None else f"{self.scale:g}"
        head = f"step {self.step} was skipped at scale {scale}"
        ends = [] if self.module is None else [f"first on rank {self.module.rank}: {self.module}"]
        if not self.entries:
            why = "no gradient of this rank held inf or NaN; last_overflow(gather=True), on every rank, tells of all"
            if self.all_ranks:
                why = "all elements of the gradients are finite, the sum of their squares is beyond fp32"
            return "\n".join([f"{head}: {self.cause if self.losses else why}", *ends])
        count = len({entry.parameter for entry in self.entries})
        cause = f"{', ' if self.loss_was_finite else '; '}{self.cause}" if self.cause else ""
        lines = [f"{head}: {count} parameter{'s' if count > 1 else ''} with non-finite gradients{cause}"]
        origin = self.origin
        shown = list(self.entries[:MOST_ROWS])
        if origin is not None and origin not in shown:
            shown[-1] = origin
        table = [COLUMNS, *(_cells(entry, entry is origin) for entry in shown)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        if len(self.entries) > len(shown):
            lines.append(f"and {len(self.entries) - len(shown)} more")
        if not self.before_reduction:
            lines.append("(ranks: of gradients as they were at the step; report_overflows() tells where they arose)")
        return "\n".join(lines + ends)


def merged(ranks: Sequence[OverflowReport]) -> OverflowReport:
    """Return what all ranks know of one step, from what each of them does.

    Entries from before the reduction are taken if any rank has one. Otherwise those of the gradients that the step was
    given: an overflow may arise in the sum over ranks. An entry that all ranks have becomes one, of rank None.
    """
    losses = tuple(loss for rank in ranks for loss in rank.losses or ())
    # One rank's unknown losses make all unknown, if no loss is known to be inf or NaN.
    are_known = bool(losses) or all(rank.losses is not None for rank in ranks)
    early = [entry for rank in ranks if rank.before_reduction for entry in rank.entries]
    late = [entry for rank in ranks for entry in (rank.at_the_step if rank.before_reduction else rank.entries)]
    counts = Counter(replace(entry, rank=None) for entry in late)
    shared = [entry for entry, count in counts.items() if count == len(ranks) > 1]
    late = [*shared, *(entry for entry in late if replace(entry, rank=None) not in shared)]
    return OverflowReport(
        ranks[0].step,
        next((rank.scale for rank in ranks if rank.scale is not None), None),
        in_order(early or late),
        before_reduction=bool(early),
        all_ranks=True,
        module=first_module(rank.module for rank in ranks),
        losses=losses if are_known else None,
    )


def first_module(found: Iterable[NonFiniteModule | None]) -> NonFiniteModule | None:
    """Return the likely origin among what watches, or ranks, saw: forward comes before backward."""
    return min(
        (module for module in found if module is not None),
        key=lambda module: (module.phase != "forward", module.call, module.rank),
        default=None,
    )


def in_order(entries: Iterable[OverflowEntry]) -> Entries:
    """Return entries by parameter, micro-batch and rank."""
    return tuple(
        sorted(entries, key=lambda one: (one.index, one.micro_batch or 0, -1 if one.rank is None else one.rank))
    )


def _cells(entry: OverflowEntry, is_origin: bool) -> tuple[str, ...]:
    counts = ((entry.num_inf, "inf"), (entry.num_nan, "nan"))
    micro_batch, largest = ("?" if own is None else f"{own:g}" for own in (entry.micro_batch, entry.largest_finite))
    return (
        entry.parameter + (" <- likely origin" if is_origin else ""),
        "all" if entry.rank is None else str(entry.rank),
        micro_batch,
        " and ".join(f"{count} {name}" for count, name in counts if count) or f"{entry.num_non_finite} inf or nan",
        str(entry.numel),
        largest,
    )
