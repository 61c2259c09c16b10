"""The Triton kernel of a step's statistics: it measures all gradients of a call in one launch.

See :mod:`megascale.kernels.triton.kernels` for what holds of all kernels over tensors.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

from megascale.kernels.triton.chunks import (
    FIRST_CHUNK,
    NARROWER,
    NUMEL,
    chunk_at,
    grad_of,
    locate,
    read,
    whole_vectors_beside,
)
from megascale.kernels.triton.interpreter import inlined, sum_of, sum_of_lanes

POINTERS = ["rows", "chunk_rows", "counters", "grads", "arrivals", "partials", "stats"]

# fmt: off


@inlined
def _measure_part(
    grad, start, first, last, squares, zeros, GRAD_DTYPE: tl.constexpr, COUNT_ZEROS: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Add elements [first, last) of a chunk to lanes: the i-th of the chunk to lane i % BLOCK, whatever VECTOR is."""
    grad_chunk = chunk_at(grad, start, GRAD_DTYPE, VECTOR)
    for begin in range(first // BLOCK * BLOCK, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < last
        if VECTOR == 1:
            mask = mask & (offsets >= first)
        g = read(grad_chunk, offsets, mask)
        squares += g * g
        if COUNT_ZEROS:
            zeros += (mask & (g == 0)).to(tl.int32)
    return squares, zeros


@inlined
def _count_non_finite(grad, start, length, GRAD_DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    grad_chunk = chunk_at(grad, start, GRAD_DTYPE, 1)
    non_finite = tl.full((BLOCK,), 0, tl.int32)
    for begin in range(0, length, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        g = read(grad_chunk, offsets, offsets < length)
        non_finite += ((tl.abs(g) < float("inf")) == 0).to(tl.int32)
    return sum_of(non_finite)


@inlined
def _measure_chunk(
    row, grad, start, length, GRAD_DTYPE: tl.constexpr, COUNT_ZEROS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return a chunk's sum of squares, fp32, its non-finite count and its zeros, int32."""
    VECTOR: tl.constexpr = 128 // GRAD_DTYPE.primitive_bitwidth
    squares = tl.full((BLOCK,), 0, tl.float32)
    zeros = tl.full((BLOCK,), 0, tl.int32)
    whole = whole_vectors_beside(grad, row, length, GRAD_DTYPE, VECTOR, VECTOR)
    if whole > 0:
        squares, zeros = _measure_part(
            grad, start, 0, whole, squares, zeros, GRAD_DTYPE, COUNT_ZEROS, BLOCK, VECTOR
        )
    if whole < length:
        squares, zeros = _measure_part(
            grad, start, whole, length, squares, zeros, GRAD_DTYPE, COUNT_ZEROS, BLOCK, 1
        )
    total = sum_of_lanes(squares, BLOCK, 1)
    non_finite = tl.full((), 0, tl.int32)
    if (total < float("inf")) == 0:  # a finite sum has finite elements only; else count them
        non_finite = _count_non_finite(grad, start, length, GRAD_DTYPE, BLOCK // NARROWER)
    return total, non_finite, sum_of(zeros)


@inlined
def _is_last(counter, number):
    """Count this program as done. Return whether it is the last of ``number``; the counter is 0 again then.

    Stores that the others made before they counted are visible to it.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, tl.full((), 1, tl.int64)) + 1 == number
    if last:
        tl.store(counter, tl.full((), 0, tl.int64))
    return last


@inlined
def _sum_partials(partials, stride, number, FAN: tl.constexpr):
    """Add up ``number`` partials, ``stride`` apart: the i-th to lane i % FAN, then lanes in pairs. Shape [4]."""
    columns = tl.arange(0, 4)[None, :]
    totals = tl.full((FAN, 4), 0, tl.float64)
    for begin in range(0, number, FAN):
        lanes = (begin + tl.arange(0, FAN))[:, None]
        mask = (lanes < number) & (columns < 3)
        # .cg: bypass this SM's cache, which does not see another program's store
        totals += tl.load(partials + lanes * stride + columns, mask=mask, other=0, cache_modifier=".cg")
    return sum_of_lanes(totals, FAN, 4)


@triton.jit(do_not_specialize=POINTERS)
def measure_kernel(
    rows, chunk_rows, counters, grads, arrivals, partials, stats, COLUMNS: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    COUNT_ZEROS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, FAN: tl.constexpr,
):
    """Write each row's sum of squares, non-finite count and zeros to ``stats``, fp64, shape [rows, 3].

    Of FAN chunks the program that ends last adds them up, and the last of those programs adds up their sums, always in
    the order of the chunks. ``partials``: fp64, shape [chunks, 4], of rows of more than one chunk.
    """
    index, slot, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    grad, length = grad_of(grads, slot, length)
    squares, non_finite, zeros = _measure_chunk(row, grad, start, length, GRAD_DTYPE, COUNT_ZEROS, BLOCK)
    out = stats + slot * 3
    chunks = tl.maximum((tl.load(row + NUMEL) + (CHUNK - 1)) // CHUNK, 1).to(tl.int32)
    mine = out
    if chunks > 1:
        mine = partials + tl.program_id(0).to(tl.int64) * 4
    tl.store(mine, squares.to(tl.float64))
    tl.store(mine + 1, non_finite.to(tl.float64))
    tl.store(mine + 2, zeros.to(tl.float64))
    if chunks > 1:
        columns = tl.arange(0, 4)
        first = tl.load(row + FIRST_CHUNK)
        group = (start // CHUNK // FAN).to(tl.int32)
        head = first + group * FAN
        members = tl.minimum(chunks - group * FAN, FAN)
        if _is_last(arrivals + head, members):
            sums = _sum_partials(partials + head * 4, 4, members, FAN)
            tl.store(partials + head * 4 + columns, sums, mask=columns < 3)
            groups = (chunks + (FAN - 1)) // FAN
            if _is_last(counters + index, groups):
                sums = _sum_partials(partials + first * 4, 4 * FAN, groups, FAN)
                tl.store(out + columns, sums, mask=columns < 3)
