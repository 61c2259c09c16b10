"""What lets one source of kernels run compiled on a device and, fast enough for tests, in Triton's interpreter."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from typing import Any

import triton
import triton.language as tl

from megascale.errors import UsageError

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether these kernels run in Triton's interpreter."""

if isinstance(tl.sum, triton.JITFunction) == INTERPRETED:
    raise UsageError("TRITON_INTERPRET has changed since triton was imported; set it before Python starts")

INTERPRETED_KERNELS = tl.constexpr(INTERPRETED)


def inlined(function: Any) -> Any:
    """Make a function that kernels call. In the interpreter it stays as it is: a jit function called there looks
    through all of Triton anew, which takes longer than the function.
    """
    return function if INTERPRETED else triton.jit(function)


@inlined
def sum_of(values, AXIS: tl.constexpr = 0):
    """Return sums over a dimension, in an order that the shape and the layout of registers fix."""
    if INTERPRETED_KERNELS:
        return tl.reduce(values, AXIS, tl.standard._sum_combine)  # tl.sum without the jit function around it
    return tl.sum(values, axis=AXIS)


@inlined
def sum_of_lanes(lanes, NUMBER: tl.constexpr):
    """Return the sum over the only dimension: neighbours first, then neighbouring sums, until one is left.

    That order does not depend on how the lanes lie in registers. NUMBER: how many there are, a power of two; more lanes
    that are 0 do not change the bits.
    """
    for level in tl.static_range(30):
        if NUMBER >> level > 1:
            lanes = sum_of(tl.reshape(lanes, (NUMBER >> (level + 1), 2)), 1)
    return sum_of(lanes)
