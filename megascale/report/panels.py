"""Which pictures a report has, and which column each shows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megascale.metrics.rows import GRAD_NORM, LR, PHASE, SCALE, SECONDS, SKIPPED, STEP, ZERO_FRACTION
from megascale.report.runs import Run

Kind = Literal["line", "noisy", "scale", "skips", "phases", "parameters"]


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        title: what it shows, with the unit.
        column: of the runs' tables; empty where several are shown.
        kind: "line" joins points; "noisy" is a faint line with means over it; "scale" has powers of two; "skips" has a
            tick for each skipped step; "phases" and "parameters" have bars.
        log: whether values grow upwards by factors.
        note: what a reader should know, below the picture.
    """

    title: str
    column: str = ""
    kind: Kind = "line"
    log: bool = False
    note: str = ""


KNOWN = (
    Panel("Loss", "loss", "noisy", log=True, note="Bold: mean of a span. A cross at the top: inf or NaN."),
    Panel("Accuracy", "accuracy", "noisy"),
    Panel("Accuracy on the batch", "batch_accuracy", "noisy"),
    Panel("Loss on all held-out data", "heldout_loss", log=True),
    Panel("Accuracy on all held-out data", "total_accuracy"),
    Panel("Gradient norm, unscaled, before clipping", GRAD_NORM, "noisy", log=True, note="A cross: inf or NaN."),
    Panel("Loss scale", SCALE, "scale", log=True),
    Panel("Skipped steps", SKIPPED, "skips", note="A tick for each, and their number."),
    Panel("Share of gradient elements that are zero", ZERO_FRACTION, "noisy"),
    Panel("Learning rate", LR),
    Panel("Samples per second", "samples_per_second", "noisy"),
    Panel("Wall time of a step, s", SECONDS, "noisy", log=True),
)
ALWAYS = ("loss", SCALE, SKIPPED)
"""Columns that are shown though they do not vary."""
PARAMETERS = Panel(
    "Steps in which a gradient overflowed, by parameter", kind="parameters", note="The eight parameters with most."
)
PHASES = Panel("Mean wall time by phase, ms", kind="phases")


def panels_of(runs: Sequence[Run]) -> Iterator[Panel]:
    """Yield a panel for each column in which any run has a value: first those of KNOWN, then one for any other.

    Columns that never vary have none, but for loss, scale and skipped steps.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    known = {panel.column: panel for panel in KNOWN}
    measured = [name for name in names if any(not np.isnan(run.get(name)).all() for run in runs)]
    shown = [name for name in measured if name in ALWAYS or varies(runs, name)]
    yield from (panel for panel in KNOWN if panel.column in shown)
    for name in shown:
        if name not in known and name != STEP and not name.startswith(PHASE):
            yield Panel(name, name, "noisy")
    if any(name.startswith(PHASE) for name in measured):
        yield PHASES
    if any(run.overflows for run in runs):
        yield PARAMETERS


def varies(runs: Sequence[Run], column: str) -> bool:
    """Return whether a column has two different values, or if there is one step, any."""
    values = np.concatenate([run.get(column) for run in runs])
    values = values[~np.isnan(values)]
    return len(values) > 0 and (bool((values != values[0]).any()) or all(len(run.steps) == 1 for run in runs))


def phase_means(run: Run) -> dict[str, float]:
    """Return the mean seconds of each phase of a step."""
    names = [name for name in run.series if name.startswith(PHASE) and np.isfinite(run.get(name)).any()]
    return {name.removeprefix(PHASE): float(np.nanmean(run.get(name))) for name in names}


def steps_by_parameter(run: Run) -> dict[str, int]:
    """Return in how many steps each parameter's gradient overflowed, most first."""
    steps: dict[str, set[int]] = {}
    for overflow in run.overflows:
        steps.setdefault(overflow["parameter"], set()).add(overflow["step"])
    return dict(sorted(((name, len(of)) for name, of in steps.items()), key=lambda one: -one[1]))


def is_positive(runs: Sequence[Run], column: str) -> bool:
    """Return whether all finite values of a column are above 0, so that they have logarithms."""
    return not any(bool((np.isfinite(run.get(column)) & (run.get(column) <= 0)).any()) for run in runs)
