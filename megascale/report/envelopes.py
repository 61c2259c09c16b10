"""Reduces a curve of any length to a few points, without losing a spike."""

from typing import NamedTuple

import numpy as np

from megascale.report.runs import Series


class Curve(NamedTuple):
    """Points of a line, both of shape [points]."""

    steps: Series
    values: Series


def envelope(steps: Series, values: Series, points: int) -> Curve:
    """Return a line of at most ``points`` points through the least and the greatest value of each span of steps.

    Non-finite values are left out. A curve that is short enough is returned as it is. Spans are equal in steps, so that
    each is one pixel column of a picture that is ``points / 2`` columns wide (the min-max part of M4, Jugel et al.,
    "M4: a visualization-oriented time series data aggregation", VLDB 2014).

    Args:
        steps: increasing, shape [n].
        values: shape [n].
        points: 2 or more.
    """
    kept = np.isfinite(values)
    steps, values = steps[kept], values[kept]
    if len(steps) <= points:
        return Curve(steps, values)
    firsts = _firsts_of_spans(steps, points // 2)
    owner = np.repeat(np.arange(len(firsts)), np.diff([*firsts, len(steps)]))
    by_value = np.lexsort((values, owner))  # spans one after the other, in each the least value first
    least, greatest = by_value[firsts], by_value[np.r_[firsts[1:], len(steps)] - 1]
    chosen = np.unique(np.concatenate([least, greatest]))
    return Curve(steps[chosen], values[chosen])


def averaged(steps: Series, values: Series, points: int) -> Curve:
    """Return the mean of the finite values of each of ``points`` spans of steps, at the spans' mean steps."""
    kept = np.isfinite(values)
    steps, values = steps[kept], values[kept]
    if len(steps) <= points:
        return Curve(steps, values)
    firsts = _firsts_of_spans(steps, points)
    counts = np.diff([*firsts, len(steps)])
    return Curve(np.add.reduceat(steps, firsts) / counts, np.add.reduceat(values, firsts) / counts)


def marks(steps: Series, where: Series, points: int) -> Series:
    """Return the steps at which ``where`` is not 0; if there are more than ``points``, the first of each span only."""
    marked = steps[where != 0]
    if len(marked) <= points:
        return marked
    spans = np.floor((marked - steps[0]) / (steps[-1] - steps[0]) * (points - 1))
    return marked[np.unique(spans, return_index=True)[1]]


def _firsts_of_spans(steps: Series, spans: int) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Return the index of the first step of each of ``spans`` equal spans that has one."""
    span = np.floor((steps - steps[0]) / (steps[-1] - steps[0]) * spans)
    return np.unique(np.minimum(span, spans - 1), return_index=True)[1]
