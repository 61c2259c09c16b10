"""The picture of the experiment: loss and loss scale, one above the other, with names at the lines."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Series = npt.NDArray[np.float64]
MEANS = 80
"""Points of a line of losses, each the mean of some steps."""
MOST_POINTS = 600
"""Points of a line of loss scales: two for each column of pixels of the picture."""
GREY = "#808080"
"""Letters and axes, which white and black pages both show."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megascale",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.edgecolor": GREY,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY),
}


class Line(NamedTuple):
    """How a run is drawn: its name, colour and width, and where its name stands in each panel.

    Places are (share of the steps, factor above or below the line); None: the run is not in that panel.
    """

    name: str
    colour: str
    width: float
    in_loss: tuple[float, float] | None
    in_scale: tuple[float, float] | None


LINES = {
    "fp32": Line("fp32", GREY, 3.0, (0.30, 0.42), None),
    "no_scaling": Line("fp16 without scaling", "#D55E00", 1.5, (0.62, 1.3), (0.6, 4.0)),
    "dynamic_scaling_65536": Line("fp16 with megascale", "#1F83C4", 1.5, (0.55, 1.45), (0.62, 0.01)),
    "dynamic_scaling_4294967296": Line("from 2³²", "#2A9D74", 1.2, None, (0.03, 30.0)),
}
"""The runs of the picture, by the experiment's names. Those behind come first."""


def write_svg(runs: Mapping[str, Sequence[Mapping[str, Series]]], path: Path) -> None:
    """Write both panels.

    Args:
        runs: by a name of :data:`LINES` (others are left out), the columns ``step``, ``loss`` and ``scale`` of one run
            per seed, each of shape [steps].
        path: of the SVG.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 5.0), layout="constrained")
        figure.patch.set_alpha(0.0)
        loss, scale = figure.subplots(2, 1, sharex=True)
        for axes, title in ((loss, "loss"), (scale, "loss scale")):
            axes.patch.set_alpha(0.0)
            axes.set_title(title)
            axes.set_yscale("log", base=10 if axes is loss else 2)
        for name, line in LINES.items():
            seeds = runs.get(name, ())
            for columns in seeds:
                if line.in_loss is not None:
                    steps, losses = averaged(columns["step"], columns["loss"], MEANS)
                    loss.plot(steps, losses, color=line.colour, linewidth=line.width)
                if line.in_scale is not None:
                    steps, scales = envelope(columns["step"], columns["scale"], MOST_POINTS)
                    scale.step(steps, scales, where="post", color=line.colour, linewidth=line.width)
            if seeds:
                _name(loss, line, seeds[0], "loss", line.in_loss)
                _name(scale, line, seeds[0], "scale", line.in_scale)
        scale.set_xlabel("step")
        scale.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    path.write_text(stream.getvalue(), encoding="utf-8")


def envelope(steps: Series, values: Series, points: int) -> tuple[Series, Series]:
    """Return a line of at most ``points`` points through the least and the greatest value of each span of steps.

    A spike of one step stays. Values that are not finite are left out; a curve that is short enough stays as it is.
    ``steps``: increasing, shape [n]; ``values``: shape [n]; ``points``: 2 or more.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(steps) <= points:
        return steps, values
    chosen: set[int] = set()
    for span in _spans(steps, points // 2):
        chosen |= {int(span[values[span].argmin()]), int(span[values[span].argmax()])}
    order = sorted(chosen)
    return steps[order], values[order]


def averaged(steps: Series, values: Series, points: int) -> tuple[Series, Series]:
    """Return the mean of the finite values of each of ``points`` spans of steps, at the spans' mean steps."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(steps) <= points:
        return steps, values
    spans = _spans(steps, points)
    return np.array([steps[span].mean() for span in spans]), np.array([values[span].mean() for span in spans])


def _spans(steps: Series, number: int) -> list[npt.NDArray[np.intp]]:
    """Return the indices of the steps in each of ``number`` spans of equal length; spans without any are left out."""
    edges = np.linspace(steps[0], steps[-1], number + 1)[1:-1]
    spans = np.split(np.arange(len(steps)), np.searchsorted(steps, edges))
    return [span for span in spans if len(span)]


def _name(
    axes: Axes, line: Line, columns: Mapping[str, Series], column: str, place: tuple[float, float] | None
) -> None:
    """Write a run's name near its line, where that has a value."""
    steps, values = averaged(columns["step"], columns[column], MEANS)
    if place is None or not len(steps):
        return
    share, factor = place
    step = steps[0] + share * (steps[-1] - steps[0])
    value = float(np.interp(step, steps, values))
    axes.text(step, value * factor, line.name, color=line.colour, clip_on=True).set_in_layout(False)
