"""Moments held as 8-bit codes, in kernels: groups of 32 elements are the rows of a two-dimensional block.

:mod:`megascale.kernels.compact_moments` specifies the codes. All functions work on a block of one chunk whose first
element, and so every row of the block, begins a group.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: SIM300 - it knows Python, not what Triton compiles

import triton.language as tl

from megascale.kernels import compact_moments
from megascale.kernels.triton.chunks import START, read, write
from megascale.kernels.triton.interpreter import inlined, max_of_rows
from megascale.kernels.triton.remainders import folded, nearest

GROUP = tl.constexpr(compact_moments.GROUP)
FINEST = tl.constexpr(compact_moments.FINEST)
COARSEST = tl.constexpr(compact_moments.COARSEST)
TOP_ROOT = tl.constexpr(compact_moments.TOP_CODE)
NAN_BITS = tl.constexpr(compact_moments.NAN_BITS)
LEAST_QUOTIENT = tl.constexpr(compact_moments.LEAST_QUOTIENT)
TOP_QUOTIENT = tl.constexpr(127.0)
# As int32, whose products wrap as those of uint32 do.
INDEX_STRIDE = tl.constexpr(compact_moments.INDEX_STRIDE - (1 << 32))
STEP_STRIDE = tl.constexpr(compact_moments.STEP_STRIDE - (1 << 32))
TO_MANTISSA = tl.constexpr(compact_moments.TO_MANTISSA)
MANTISSA_BITS = tl.constexpr(compact_moments.MANTISSA_BITS)
ABOVE_ONE = tl.constexpr(compact_moments.ABOVE_ONE)

# fmt: off


@inlined
def offsets_of(begin, BLOCK: tl.constexpr, CODES: tl.constexpr):
    """Return the offsets of a block's elements: shape [BLOCK], or where there are CODES [groups, GROUP]."""
    if CODES:
        offsets = begin + (tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :])
    else:
        offsets = begin + tl.arange(0, BLOCK)
    return offsets


@inlined
def zeros_of(BLOCK: tl.constexpr, CODES: tl.constexpr):
    """Return int32 zeros, one for each element of a block, or where there are CODES for each group."""
    return tl.full((BLOCK // GROUP if CODES else BLOCK,), 0, tl.int32)


@inlined
def first_dither(row, start, step, CODES: tl.constexpr):
    """Return the dither of a chunk's first element as int32, modulo 2**32. step: landed steps before this one, fp32."""
    dither = tl.full((), 0, tl.int32)
    if CODES:
        index = (tl.load(row + START) + start).to(tl.int32)
        count = (step + 1).to(tl.int64)
        mixed = folded((count >> 4).to(tl.int32) * INDEX_STRIDE, 15)
        dither = index * INDEX_STRIDE + count.to(tl.int32) * STEP_STRIDE + folded(mixed * STEP_STRIDE, 13)
    return dither


@inlined
def _dithers(dither, offsets):
    """Return the dithers of a block's elements as uint32. dither: of the chunk's first one."""
    return (dither + offsets * INDEX_STRIDE).to(tl.uint32, bitcast=True)


@inlined
def scales_of(row, SCALE: tl.constexpr, start, DTYPE: tl.constexpr):
    """Return a pointer to the scale of a chunk's first group, as int32. DTYPE: of the moment, which may need none."""
    pointer = row
    if DTYPE == tl.int8 or DTYPE == tl.uint8:
        pointer = tl.load(row + SCALE).to(tl.pointer_type(tl.int32)) + start // GROUP
    return pointer


@inlined
def before(offsets, end):
    """Return which offsets are less than ``end``. None: all, known when the kernel is compiled."""
    return tl.full(offsets.shape, True, tl.int1) if end is None else offsets < end


@inlined
def _read_scale(scales, begin, last, BLOCK: tl.constexpr):
    """Return the bits of the scales of a block's groups, int32: shape [groups, 1]."""
    groups = tl.arange(0, BLOCK // GROUP)
    return tl.load(scales + begin // GROUP + groups, mask=before(begin + groups * GROUP, last), other=0)[:, None]


@inlined
def _magnitude(value):
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@inlined
def _inverse(scale):
    return tl.where(scale == 0, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))


@inlined
def read_moments(
    avg_chunk, sq_chunk, avg_scales, sq_scales, begin, last, offsets, mask, AVG_DTYPE: tl.constexpr,
    SQ_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return Adam's ``exp_avg`` and ``exp_avg_sq`` in fp32."""
    if SQ_DTYPE == tl.uint8:
        scale = _read_scale(sq_scales, begin, last, BLOCK)
        code = tl.load(sq_chunk + offsets, mask=mask, other=0).to(tl.int32)
        floor = tl.where(max_of_rows(code)[:, None] == 0, 0, scale & -4)  # 0: of a group that was set to 0
        root = (floor + (code << ((scale & 3) + FINEST))).to(tl.float32, bitcast=True)
        exp_avg_sq = root * root
    else:
        exp_avg_sq = read(sq_chunk, offsets, mask)
        root = exp_avg_sq
        if AVG_DTYPE == tl.int8:
            root = tl.sqrt_rn(exp_avg_sq)
    exp_avg = read(avg_chunk, offsets, mask)
    if AVG_DTYPE == tl.int8:
        scale = _read_scale(avg_scales, begin, last, BLOCK)
        exp_avg = exp_avg * scale.to(tl.float32, bitcast=True) * root
    return exp_avg, exp_avg_sq


@inlined
def _encode_root(root, mask, dithers):
    """Return the codes of roots, the scales' bits, shape [groups], and the roots as held."""
    bits = tl.minimum(_magnitude(root), NAN_BITS)  # a root's NaN is a quiet one: no less than that
    highest = max_of_rows(tl.where(mask, bits, 0))[:, None]
    lowest = 0x7FFFFFFF - max_of_rows(tl.where(mask, 0x7FFFFFFF - bits, 0))[:, None]
    shift = tl.full((root.shape[0], 1), FINEST, tl.int32)
    for finer in tl.static_range(FINEST, COARSEST):
        shift += ((highest >> finer) - (lowest >> finer) > TOP_ROOT - 1).to(tl.int32)
    floor = tl.maximum((highest >> shift) + (1 - TOP_ROOT), 0)
    dithered = bits + (dithers >> (32 - shift).to(tl.uint32)).to(tl.int32)
    code = tl.maximum((dithered >> shift) - floor, 0)
    held = ((floor + code) << shift).to(tl.float32, bitcast=True)
    return code, (floor << shift) + (shift - FINEST), held


@inlined
def _encode_quotient(exp_avg, held, mask, dithers):
    """Return the codes of first moments and the scales, fp32, shape [groups, 1]. held: roots of the second moments."""
    quotient = tl.where(held == 0, 0.0, tl.div_rn(exp_avg, held))
    largest = max_of_rows(tl.where(mask, _magnitude(quotient), 0)).to(tl.float32, bitcast=True)[:, None]
    parts = tl.full(largest.shape, TOP_QUOTIENT, tl.float32)
    scale = tl.where(largest < LEAST_QUOTIENT, 0.0, tl.div_rn(largest, parts))
    from_1_to_2 = (((dithers << TO_MANTISSA) & MANTISSA_BITS) | ABOVE_ONE).to(tl.float32, bitcast=True)
    dithered = quotient * _inverse(scale) + (from_1_to_2 - 1.5)
    return tl.where(dithered == dithered, nearest(dithered), 0), scale


@inlined
def _write_scale(scales, begin, last, bits, BLOCK: tl.constexpr):
    """Write the scales' bits, shape [groups, 1], of groups that begin before ``last``."""
    groups = tl.arange(0, BLOCK // GROUP)
    within = before(begin + groups * GROUP, last)
    tl.store(scales + begin // GROUP + groups, tl.reshape(bits, (BLOCK // GROUP,)), mask=within)


@inlined
def write_moments(
    avg_chunk, sq_chunk, avg_scales, sq_scales, begin, last, offsets, mask, kept, exp_avg, exp_avg_sq, dither,
    AVG_DTYPE: tl.constexpr, SQ_DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write Adam's moments, and the scales of groups that begin before ``last``."""
    if SQ_DTYPE == tl.uint8:
        code, scale, root = _encode_root(tl.sqrt_rn(exp_avg_sq), mask, _dithers(dither, offsets))
        tl.store(sq_chunk + offsets, code.to(tl.uint8), mask=kept)
        _write_scale(sq_scales, begin, last, scale, BLOCK)
    else:
        write(sq_chunk, offsets, exp_avg_sq, kept)
    if AVG_DTYPE == tl.int8:
        if SQ_DTYPE != tl.uint8:
            root = tl.sqrt_rn(exp_avg_sq)
        code, scale = _encode_quotient(exp_avg, root, mask, _dithers(dither, offsets))
        tl.store(avg_chunk + offsets, code.to(tl.int8), mask=kept)
        _write_scale(avg_scales, begin, last, scale.to(tl.int32, bitcast=True), BLOCK)
    else:
        write(avg_chunk, offsets, exp_avg, kept)
