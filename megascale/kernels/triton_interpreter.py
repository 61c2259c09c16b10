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
def sum_of(values):
    """Return sums over the first dimension, in an order that the shape fixes."""
    if INTERPRETED_KERNELS:
        return tl.reduce(values, 0, tl.standard._sum_combine)  # tl.sum without the jit function around it
    return tl.sum(values, axis=0)
