"""Draws panels with matplotlib, each as an SVG of its own, or all in one PNG."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from megascale.report.envelopes import averaged, envelope, marks
from megascale.report.hover import Frame
from megascale.report.panels import Panel, is_positive, phase_means, steps_by_parameter
from megascale.report.runs import Run, Series

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
"""Distinct for colour-blind readers too (Okabe and Ito, "Color Universal Design", 2008)."""
DASHES = ("", "6 2", "6 2 1 2", "1.5 1.5")
"""SVG's stroke-dasharray of each run's lines."""
MOST_POINTS = 600
"""Of one line: a panel is some 300 pixels wide, and each column of pixels has a least and a greatest value."""
MOST_POINTS_OF_PANEL = 4800
"""Of all lines in a panel, so that a page stays small."""
MEANS = 60
"""Points of the line of means that is drawn over a noisy one."""
MOST_BARS = 8
WIDTH, HEIGHT = 4.6, 2.7
"""Of one panel, in inches of 100 pixels."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megascale",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.3,
}

GREY = "#808080"
"""Letters and axes of a page's pictures, which white and black pages both show."""
ON_ANY_PAGE: Any = STYLE | {
    "axes.edgecolor": GREY,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY),
}


class Drawn(NamedTuple):
    """A picture, and where its axes are."""

    document: str
    frame: Frame


Styles = dict[str, tuple[str, str]]


def styles_of(runs: Sequence[Run]) -> Styles:
    """Return each label's colour and dashes."""
    labels = list(dict.fromkeys(run.label for run in runs))
    return {
        label: (COLOURS[i % len(COLOURS)], DASHES[(i + i // len(COLOURS)) % len(DASHES)])
        for i, label in enumerate(labels)
    }


def svg(panel: Panel, runs: Sequence[Run]) -> Drawn:
    """Return a panel as a transparent SVG document, without a title: a page has its own."""
    with matplotlib.rc_context(ON_ANY_PAGE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        _draw(panel, axes, runs)
        stream = io.StringIO()
        hidden = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(stream, format="svg", transparent=True, metadata=hidden)
        box, (first, last) = axes.get_position(), axes.get_xlim()
    frame = Frame(box.x0, box.x1, 1.0 - box.y1, 1.0 - box.y0, first, last)
    # matplotlib writes paths to a millionth of a point; a tenth is enough.
    return Drawn(re.sub(r' d="[^"]*"', lambda path: _PRECISE.sub(_rounded, path[0]), stream.getvalue()), frame)


_PRECISE = re.compile(r"\d+\.\d{2,}")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}"


def write_png(panels: Sequence[Panel], runs: Sequence[Run], path: Path) -> None:
    """Write all panels as one picture, with a legend."""
    rows = -(-len(panels) // 2)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.2 * WIDTH, (HEIGHT + 0.3) * rows + 0.5), layout="constrained")
        FigureCanvasAgg(figure)
        for index, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, 2, index)
            axes.set_title(panel.title)
            _draw(panel, axes, runs)
        handles = [
            matplotlib.lines.Line2D([], [], color=colour, linestyle=_line_style(dashes), label=label)
            for label, (colour, dashes) in styles_of(runs).items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=110, format="png")


def _draw(panel: Panel, axes: Axes, runs: Sequence[Run]) -> None:
    if panel.kind in ("phases", "parameters"):
        _draw_bars(panel, axes, runs)
        return
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    if panel.kind == "skips":
        _draw_skips(axes, runs)
        return
    if panel.log and is_positive(runs, panel.column):
        _make_log(axes, 2 if panel.kind == "scale" else 10, runs, panel.column)
    points = max(min(MOST_POINTS, MOST_POINTS_OF_PANEL // len(runs)), 100)
    for run, (colour, dashes) in zip(runs, _styles(runs), strict=True):
        _draw_line(panel, axes, run, points, {"color": colour, "linestyle": _line_style(dashes)})
    _set_steps(axes, runs)


def _set_steps(axes: Axes, runs: Sequence[Run]) -> None:
    """Let all pictures begin and end at the same steps."""
    first, last = min(run.steps[0] for run in runs), max(run.steps[-1] for run in runs)
    margin = (last - first) * 0.03 or 1.0
    axes.set_xlim(first - margin, last + margin)


def _draw_line(panel: Panel, axes: Axes, run: Run, points: int, style: dict[str, Any]) -> None:
    """Draw one run's values. Of noisy ones the means, too, in front of the noise of all runs."""
    values = run.get(panel.column)
    line = envelope(run.steps, values, points)
    if panel.kind == "scale":
        axes.step(*line, where="post", linewidth=1.4, **style)
    elif panel.kind == "noisy" and len(line.steps) > MEANS:
        axes.plot(*line, linewidth=0.6, alpha=0.3, color=style["color"])
        axes.plot(*averaged(run.steps, values, MEANS), linewidth=1.5, zorder=3, **style)
    else:
        axes.plot(*line, linewidth=1.4, **style)
    if len(line.steps) == 1:
        axes.plot(*line, "o", color=style["color"])
    _mark_non_finite(axes, run.steps, values, style["color"])


def _make_log(axes: Axes, base: int, runs: Sequence[Run], column: str) -> None:
    """Make the axis of values logarithmic, to base 2 or 10; to base 10 only where they span at least a factor of 10."""
    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_locator(LogLocator(base=base, numticks=7))
    values = np.concatenate([run.get(column) for run in runs])
    values = values[np.isfinite(values)]
    if len(values) and values.max() < (4 if base == 2 else 10) * values.min():
        if base == 2:
            axes.set_ylim(values.min() / 2.2, values.max() * 2.2)
        else:
            axes.set_yscale("linear")
            axes.yaxis.set_major_locator(MaxNLocator(6))


def _mark_non_finite(axes: Axes, steps: Series, values: Series, colour: str) -> None:
    """Put a cross at the top where a value is inf or NaN. A NaN that only means that nothing was measured has none."""
    infinite = np.isinf(values)
    if np.isnan(values).any() and not _is_sparse(values):
        infinite |= np.isnan(values)
    found = marks(steps, infinite, 100)
    if len(found):
        axes.plot(
            found, np.full(len(found), 0.985), "x", color=colour, markersize=4, transform=axes.get_xaxis_transform()
        )


def _is_sparse(values: Series) -> bool:
    """Return whether NaN means that nothing was measured: it comes first, or between most of the finite values."""
    finite = np.flatnonzero(np.isfinite(values))
    return len(finite) > 0 and (finite[0] > 0 or bool((np.diff(finite) > 1).mean() > 0.5))


def _draw_skips(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw a row for each run, with a tick for each skipped step."""
    for row, (run, (colour, _)) in enumerate(zip(runs, _styles(runs), strict=True)):
        skipped = run.get("skipped")
        axes.hlines(row, run.steps[0], run.steps[-1], color=colour, linewidth=0.6, alpha=0.6)
        axes.vlines(marks(run.steps, skipped, 400), row - 0.36, row + 0.36, color=colour, linewidth=1.1)
    axes.set_yticks(range(len(runs)), [f"{int(np.nansum(run.get('skipped'))):,} of {len(run.steps):,}" for run in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    _set_steps(axes, runs)
    axes.grid(axis="y", visible=False)


def _draw_bars(panel: Panel, axes: Axes, runs: Sequence[Run]) -> None:
    """Draw a group of bars for each phase or parameter: one bar for each run."""
    of_runs = [
        {name: seconds * 1e3 for name, seconds in phase_means(run).items()}
        if panel.kind == "phases"
        else {name: float(steps) for name, steps in steps_by_parameter(run).items()}
        for run in runs
    ]
    totals: dict[str, float] = {}
    for own in of_runs:
        for name, value in own.items():
            totals[name] = totals.get(name, 0.0) + value
    names = list(totals) if panel.kind == "phases" else sorted(totals, key=lambda name: -totals[name])
    names = names[:MOST_BARS]
    height = 0.8 / len(runs)
    for row, (own, (colour, _)) in enumerate(zip(of_runs, _styles(runs), strict=True)):
        places = np.arange(len(names)) - 0.4 + height * (row + 0.5)
        axes.barh(places, [own.get(name, 0.0) for name in names], height * 0.9, color=colour)
    axes.set_yticks(range(len(names)), [_shortened(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    if panel.kind == "parameters":
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


def _shortened(name: str, most: int = 26) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _styles(runs: Sequence[Run]) -> list[tuple[str, str]]:
    of_labels = styles_of(runs)
    return [of_labels[run.label] for run in runs]


def _line_style(dashes: str) -> Any:
    return (0, [float(length) for length in dashes.split()]) if dashes else "-"


__all__ = ["COLOURS", "styles_of", "svg", "write_png"]
