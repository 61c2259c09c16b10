"""Draws runs of the training program: loss, accuracies, gradient norm, loss scale and skipped steps."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from megascale.errors import RunError
from megascale.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("loss", "batch_accuracy", "total_accuracy", "grad_norm", "scale", "skipped")
STYLES = ("-", "--", "-.", ":")
WINDOW = 20
"""Steps over which loss and batch accuracy are averaged: single batches scatter."""


def draw_runs(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Write a PNG of runs over their steps: one colour for each name, one line for each of its seeds.

    Raises RunError if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise RunError("the figure needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from megascale.report.drawing import COLOURS

    figure, axes = pyplot.subplots(3, 2, figsize=(10, 8.5), sharex=True)
    panels = list(axes.flat)
    for index, (name, seeds) in enumerate(runs.items()):
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)], "linewidth": 1.2}
        for number, run in enumerate(seeds):
            for panel, (steps, values) in zip(panels, _curves(run), strict=True):
                panel.plot(steps, values, alpha=0.85, label=name if number == 0 else None, **style)
    _label(panels)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(run: Run) -> Iterator[tuple[list[float], list[float]]]:
    """Yield steps and values of each panel, without non-finite values."""
    columns = {name: run.get(name).tolist() for name in COLUMNS}
    steps: list[float] = run.steps.tolist()
    yield _finite(steps, _averaged(columns["loss"]))
    yield _finite(steps, _averaged(columns["batch_accuracy"]))
    yield _finite(steps, columns["total_accuracy"])
    yield _finite(steps, columns["grad_norm"])
    yield _finite(steps, [math.log2(scale) for scale in columns["scale"]])
    yield steps, list(accumulate(columns["skipped"]))


def _label(panels: "Sequence[Axes]") -> None:
    titles = (
        f"loss, mean of {WINDOW} steps",
        f"accuracy on the batch, mean of {WINDOW} steps",
        "accuracy on all held-out data",
        "gradient norm, unscaled",
        "loss scale, log2",
        "skipped steps so far",
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    for index in (0, 3):
        panels[index].set_yscale("log")
    panels[5].set_yscale("symlog", linthresh=1)
    panels[5].set_ylim(bottom=0)
    for panel in panels[-2:]:
        panel.set_xlabel("step")


def _averaged(values: Sequence[float]) -> list[float]:
    """Return, for each value, the mean of the finite ones among the last WINDOW values."""
    means = []
    for end in range(1, len(values) + 1):
        recent = [value for value in values[max(0, end - WINDOW) : end] if math.isfinite(value)]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means


def _finite(steps: Iterable[float], values: Iterable[float]) -> tuple[list[float], list[float]]:
    kept = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return [step for step, _ in kept], [value for _, value in kept]
