"""The picture of the experiment: loss and loss scale, one above the other, with names at the lines."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megascale.report.drawing import GREY, ON_ANY_PAGE
from megascale.report.envelopes import averaged, envelope
from megascale.report.runs import Run

MEANS = 80
"""Points of a line of losses, each the mean of some steps."""


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


def write_svg(runs: Sequence[Run], path: Path) -> None:
    """Write both panels. ``runs``: labelled as in :data:`LINES`; others are left out. Seeds share a label."""
    style = ON_ANY_PAGE | {"font.size": 10, "axes.titlesize": 11}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.2, 5.0), layout="constrained")
        figure.patch.set_alpha(0.0)
        loss, scale = figure.subplots(2, 1, sharex=True)
        for axes, title in ((loss, "loss"), (scale, "loss scale")):
            axes.patch.set_alpha(0.0)
            axes.set_title(title)
            axes.set_yscale("log", base=10 if axes is loss else 2)
        for label, line in LINES.items():
            own = [run for run in runs if run.label == label]
            for run in own:
                if line.in_loss is not None:
                    curve = averaged(run.steps, run.get("loss"), MEANS)
                    loss.plot(*curve, color=line.colour, linewidth=line.width)
                if line.in_scale is not None:
                    curve = envelope(run.steps, run.get("scale"), 600)
                    scale.step(*curve, where="post", color=line.colour, linewidth=line.width)
            if own:
                _name(loss, line, own[0], "loss", line.in_loss)
                _name(scale, line, own[0], "scale", line.in_scale)
        scale.set_xlabel("step")
        scale.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    path.write_text(stream.getvalue(), encoding="utf-8")


def _name(axes: Axes, line: Line, run: Run, column: str, place: tuple[float, float] | None) -> None:
    """Write a run's name near its line, where that has a value."""
    steps, values = averaged(run.steps, run.get(column), MEANS)
    if place is None or not len(steps):
        return
    share, factor = place
    step = steps[0] + share * (steps[-1] - steps[0])
    value = float(np.interp(step, steps, values))
    axes.text(step, value * factor, line.name, color=line.colour, clip_on=True).set_in_layout(False)
