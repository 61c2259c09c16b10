"""Lets the same kernels run compiled on a device and, fast enough for tests, in Triton's interpreter."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from typing import Any

import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether these kernels run in Triton's interpreter."""

INTERPRETED_KERNELS = tl.constexpr(INTERPRETED)


def inlined(function: Any) -> Any:
    """Decorate a function that kernels call: ``triton.jit``, or nothing in the interpreter.

    There a jit function would patch all of Triton anew at each call, which takes longer than the function.
    """
    return function if INTERPRETED else triton.jit(function)


@inlined
def sum_of(values, AXIS: tl.constexpr = 0):
    """Return sums over a dimension, in an order that the shape and the layout of registers fix."""
    if INTERPRETED_KERNELS:
        return tl.reduce(values, AXIS, tl.standard._sum_combine)  # tl.sum without the jit function around it
    return tl.sum(values, axis=AXIS)


@inlined
def max_of_rows(values):
    """Return the largest integer of each row."""
    if INTERPRETED_KERNELS:
        return tl.reduce(values, 1, tl.standard._elementwise_max)
    return tl.max(values, axis=1)


@inlined
def sum_of_lanes(lanes, NUMBER: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sum over lanes, shape [WIDTH] or none where that is 1: neighbours first, then neighbouring sums.

    That order does not depend on the layout of registers. NUMBER: the number of lanes, a power of two; additional lanes
    of 0 do not change the bits.
    """
    for level in tl.static_range(30):
        if NUMBER >> level > 1:
            lanes = sum_of(tl.reshape(lanes, (NUMBER >> (level + 1), 2, WIDTH)), 1)
    return sum_of(tl.reshape(lanes, (WIDTH,))) if WIDTH == 1 else tl.reshape(lanes, (WIDTH,))
