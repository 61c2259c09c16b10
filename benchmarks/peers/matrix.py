"""The matrix of step.py: megascale's step under every rule, dtype of parameters and dtypes of moments, in one run."""

import argparse
import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peers.contenders import MASTERS, Entry
from peers.report import bandwidths_of, bound_fractions
from peers.rounds import Bandwidth, Run, balanced_order, garbage_outside, time_round
from peers.rules import ADAMW, FP32_MOMENTS, RULES, Moments
from peers.work import Work, given_work

TURNS = 3
"""Steps that are timed of what has been built."""
WARM_UP = 2
"""Steps before them: the first makes the state."""
YARDSTICK = ADAMW, torch.float16, FP32_MOMENTS
BY_HAND = MASTERS.name
"""In place of a rule: not megascale's step, but what users write around torch's fused AdamW."""
HEADS = (
    "rule",
    "parameters",
    "moments",
    "median ms",
    "min",
    "bytes / parameter",
    "GB/s",
    "of AdamW's in fp16 (median)",
    "(middle half)",
    "of the bandwidth",
    "time / AdamW's in fp16",
    "time / masters'",
)


@dataclass
class Cell:
    """One rule on parameters of one dtype.

    Attributes:
        remainders: whether main params are held as remainders.
        run: its steps.
        beside: the yardstick's steps; each was timed just before or after the step at the same index.
    """

    rule: str
    dtype: torch.dtype
    moments: Moments
    remainders: bool = False
    run: Run = field(init=False)
    beside: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = Run(MASTERS if self.is_by_hand else Entry(self.rule, "step_ours", "plain"))

    @property
    def is_by_hand(self) -> bool:
        """Whether its steps are those of masters by hand."""
        return self.rule == BY_HAND

    def time_ratio(self) -> float:
        """Return the median of its time over that of the yardstick's step beside it."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.run.times, self.beside, strict=True))

    def ratios(self, yardstick: Run) -> list[float]:
        """Return, sorted, its GB/s over those of the yardstick's step beside it."""
        bytes_ratio = self.run.bytes_per_parameter / yardstick.bytes_per_parameter
        pairs = zip(self.run.times, self.beside, strict=True)
        return sorted(bytes_ratio * theirs / ours for ours, theirs in pairs)


# Which


def named(dtype: torch.dtype) -> str:
    """Return a dtype's name as the command line takes it."""
    return str(dtype).removeprefix("torch.")


def state_named(name: str) -> tuple[Moments, bool]:
    """Return the dtypes of the first and second moment, and whether main params are remainders.

    From "float32", "bfloat16/float32", or either with "+remainders" after it.
    """
    dtypes, _, held = name.partition("+")
    first, _, second = dtypes.partition("/")
    return (getattr(torch, first), getattr(torch, second or first)), bool(held)


def state_cell(cell: Cell) -> str:
    """Return the dtypes of the moments that the rule has, and whether main params are remainders."""
    if cell.is_by_hand:
        return named(torch.float32)
    kept = [named(dtype) for dtype, count in zip(cell.moments, RULES[cell.rule].states, strict=True) if count]
    return ("/".join(dict.fromkeys(kept)) or "none") + "+remainders" * cell.remainders


def cells_of(
    rules: Sequence[str], dtypes: Sequence[torch.dtype], states: Sequence[tuple[Moments, bool]]
) -> Iterator[Cell]:
    """Yield every combination once: moments that a rule does not have do not count. First, if asked for, by hand."""
    if BY_HAND in rules:
        yield from (Cell(BY_HAND, dtype, FP32_MOMENTS) for dtype in dtypes if dtype.itemsize == 2)
    for rule in (rule for rule in rules if rule != BY_HAND):
        used = [(RULES[rule].used(pair), held) for pair, held in states]
        for pair, held in dict.fromkeys(used):
            for dtype in dtypes:
                yield Cell(rule, dtype, pair, held)


# Measuring


def measure(arguments: argparse.Namespace, bandwidth: Bandwidth, device: torch.device) -> tuple[list[Cell], Run]:
    """Time all cells, and AdamW on fp16 parameters beside each of their steps. Returns them and that yardstick.

    Memory holds one cell at a time: each is built anew in every round, on parameters and gradients that all cells of
    its dtype share, and timed in turns with the yardstick, which stays.
    """
    dtypes = [getattr(torch, name) for name in arguments.dtypes.split(",")]
    states = [state_named(name) for name in arguments.moments.split(",")]
    cells = list(cells_of(arguments.rules.split(","), dtypes, states))
    works = {d: given_work(arguments.numel, arguments.tensors, d, device) for d in {*dtypes, YARDSTICK[1]}}
    params = {dtype: work.parameters_with_grads() for dtype, work in works.items()}
    yardstick = Cell(*YARDSTICK)
    _build(yardstick, works[YARDSTICK[1]], works[YARDSTICK[1]].parameters_with_grads())
    for index in range(arguments.rounds):
        for place in balanced_order(len(cells), index):
            cell = cells[place]
            _time(cell, yardstick.run, works[cell.dtype], params[cell.dtype], bandwidth)
    return cells, yardstick.run


def _build(cell: Cell, work: Work, params: Sequence[Tensor]) -> None:
    run = cell.run
    if not cell.is_by_hand:
        options: dict[str, Any] = {"rule": cell.rule, "moments": cell.moments, "params": params}
        options["remainders"] = cell.remainders
        run.entry = Entry(run.entry.name, run.entry.module, run.entry.build, options=options)
    run.stepper = run.entry.make(work)
    run.traffic = run.stepper.traffic
    for _ in range(WARM_UP):
        run.stepper.step()


def _time(cell: Cell, yardstick: Run, work: Work, params: Sequence[Tensor], bandwidth: Bandwidth) -> None:
    _build(cell, work, params)
    with garbage_outside():
        for turn in range(TURNS):
            for run in (cell.run, yardstick) if turn % 2 else (yardstick, cell.run):
                time_round(run, work, bandwidth)
                if run.failure:
                    raise RuntimeError(f"{cell.rule}, {cell.dtype}, moments {cell.moments}: {run.failure}")
    cell.beside += yardstick.times[-TURNS:]
    cell.run.stepper = None
    gc.collect()


# The table


def row(cell: Cell, yardstick: Run, numel: int, by_hand: float | None) -> str:
    """Return one line of the table. by_hand: what masters by hand took of the yardstick's time."""
    run, ratios = cell.run, cell.ratios(yardstick)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    cells = [
        cell.rule,
        named(cell.dtype),
        state_cell(cell),
        f"{run.median:.1f}",
        f"{min(run.times):.1f}",
        str(run.bytes_per_parameter),
        f"{run.bytes_per_parameter * numel / run.median / 1e6:.1f}",
        f"{statistics.median(ratios):.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{bound_fractions(run, numel).of_rounds:.2f}",
        f"{cell.time_ratio():.2f}",
        "-" if by_hand is None else f"{cell.time_ratio() / by_hand:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def table(cells: Sequence[Cell], yardstick: Run, numel: int, tensors: int) -> str:
    """Return the Markdown of all cells, and what its columns mean."""
    bandwidths = bandwidths_of([cell.run for cell in cells])
    own = yardstick.bytes_per_parameter * numel / 1e6
    by_hand = {cell.dtype: cell.time_ratio() for cell in cells if cell.is_by_hand}
    lines = [
        f"### {numel:,} parameters in {tensors:,} tensors",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|" + "---|" * len(HEADS),
        *(row(cell, yardstick, numel, by_hand.get(cell.dtype)) for cell in cells),
        "",
        f"AdamW on fp16 parameters with fp32 moments, beside every step: median {own / yardstick.median:.1f} GB/s, "
        f"{yardstick.median:.1f} ms. In-place bandwidth: median {statistics.median(bandwidths):.1f} GB/s, best "
        f"{max(bandwidths):.1f}.",
        "",
        "`bytes / parameter`: what the statistics of the gradients and the update have to read and write; GB/s is that "
        "over the median. `of AdamW's in fp16`: GB/s of a step over those of the AdamW step just before or after it; "
        "1 is equally fast for its bytes. `of the bandwidth`: GB/s over those of a pass just before the step. Passes "
        "that read more than they write have the lower bound: what is written back later waits for nobody. "
        "`time / AdamW's in fp16`: the median over the step beside it. `time / masters'`: that over the same of the "
        "row `masters`, fp32 masters by hand around torch's fused AdamW, on parameters of the same dtype.",
    ]
    return "\n".join(lines)


def rows_of_turns(cells: Sequence[Cell]) -> str:
    """Return every step as CSV."""
    lines = ["rule,dtype,moments,turn,ms,adamw_fp16_ms,bandwidth_gb_s"]
    for cell in cells:
        times = zip(cell.run.times, cell.beside, cell.run.bandwidths, strict=True)
        for turn, (ms, beside, bandwidth) in enumerate(times):
            what = f"{cell.rule},{named(cell.dtype)},{state_cell(cell)}"
            lines.append(f"{what},{turn},{ms:.3f},{beside:.3f},{bandwidth:.2f}")
    return "\n".join(lines) + "\n"
