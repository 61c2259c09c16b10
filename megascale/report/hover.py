"""What a pointer shows over a picture: the steps that it is at, and each run's value there. No script is needed."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megascale.report.panels import Panel
from megascale.report.runs import Run, Series

SPANS = 80
"""Columns of a picture that have a text of their own."""
UNITS = 1000
"""Of the picture's width and height, in the texts' coordinates."""


class Frame(NamedTuple):
    """Where the axes lie in a picture, as shares of its width and height from the top left, and their steps."""

    left: float
    right: float
    top: float
    bottom: float
    first: float
    last: float


def overlay(panel: Panel, runs: Sequence[Run], frame: Frame) -> str:
    """Return an invisible picture of columns with texts, to lie over that of ``panel``; empty for one of bars."""
    if panel.kind in ("phases", "parameters"):
        return ""
    low, high = min(run.steps[0] for run in runs), max(run.steps[-1] for run in runs)
    spans = int(min(SPANS, high - low + 1))
    ends = np.linspace(low - 0.5, high + 0.5, spans + 1)
    scale = (frame.right - frame.left) / (frame.last - frame.first)
    columns = []
    for start, end in pairwise(ends):
        told = [text for run in runs if (text := _describe(panel, run, start, end))]
        if told:
            x = UNITS * (frame.left + (start - frame.first) * scale)
            first, last = int(np.ceil(start)), int(np.ceil(end)) - 1
            steps = f"step {first:,}" if first >= last else f"steps {first:,} to {last:,}"
            title = f"<title>{escape('; '.join([steps, *told]))}</title>"
            columns.append(
                f'<rect x="{x:.1f}" y="{UNITS * frame.top:.0f}" width="{UNITS * (end - start) * scale:.1f}" '
                f'height="{UNITS * (frame.bottom - frame.top):.0f}">{title}</rect>'
            )
    return f'<svg class="hover" viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none">{"".join(columns)}</svg>'


def _describe(panel: Panel, run: Run, start: float, end: float) -> str:
    """Return what a run's values in a span of steps were; empty if there is none."""
    values: Series = run.get(panel.column)[(run.steps > start) & (run.steps < end)]
    if panel.kind == "skips":
        return f"{run.label}: {int(np.nansum(values))} of {len(values)} skipped" if len(values) else ""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return f"{run.label}: {'inf' if np.isinf(values).any() else 'NaN'}" if len(values) else ""
    least, greatest = f"{finite.min():.4g}", f"{finite.max():.4g}"
    return f"{run.label}: {least}" if least == greatest else f"{run.label}: {least} to {greatest}"
