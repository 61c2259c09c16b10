"""Main params in kernels: fp32 in memory, or held as remainders beside the model param.

:mod:`megascale.kernels.remainders` specifies the format. ``HELD`` rows have the remainder where others have the main
param. They pass over 16-bit tensors only, so that no fp32 main param is in memory. For updates in plain tensor code
there is a kernel that decodes and encodes: its rows have the remainder, the model param and the main param.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: SIM300 - it knows Python, not what Triton compiles

import triton
import triton.language as tl

from megascale.kernels import remainders
from megascale.kernels.triton import device_table
from megascale.kernels.triton.chunks import (
    MAIN,
    MODEL,
    NARROWER,
    OVERFLOW,
    STATE,
    arrive,
    bits_as_bf16,
    chunk_of,
    locate,
    overflow_in,
    read,
    whole_vectors,
    write,
)
from megascale.kernels.triton.interpreter import inlined, sum_of

MOST = tl.constexpr(remainders.MOST)
LINEAR = tl.constexpr(remainders.FP16_LINEAR)
UNIT = tl.constexpr(remainders.UNIT)
PER_UNIT = tl.constexpr(1 / remainders.UNIT)
HALF_INFINITY = tl.constexpr(remainders.FP16_INF)
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # a number below 2**22 that is added to it in fp32 keeps no fraction
UPDATE_VECTOR = tl.constexpr(device_table.UPDATE_VECTOR)
POINTERS = ["rows", "chunk_rows", "counters", "flags", "found_inf"]

# fmt: off


@inlined
def nearest(value):
    """Return the nearest integer, ties to even, as int32, of fp32 numbers below 2**22. Others become anything."""
    return (value + TO_WHOLE).to(tl.int32, bitcast=True) - tl.full((), TO_WHOLE, tl.float32).to(tl.int32, bitcast=True)


@inlined
def folded(value, BITS: tl.constexpr):
    """Return ``value ^ (value >> BITS)`` of int32 with their bits taken as an unsigned number's."""
    return value ^ (value.to(tl.uint32, bitcast=True) >> BITS).to(tl.int32, bitcast=True)


@inlined
def _magnitude_of_fp16(half):
    """Return |model| in fp32. half: its bits."""
    return (half & 0x7FFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@inlined
def decode(half, left, MODEL_DTYPE: tl.constexpr):
    """Return the fp32 main param. half: the model param's bits, sign-extended; left: the remainder; both int32.

    Of a pair that :func:`encode` does not return, it is the model param.
    """
    if MODEL_DTYPE == tl.bfloat16:
        alone = half << 16
        bits = alone + left
        value = bits.to(tl.float32, bitcast=True)
        bits = tl.where(((left < -MOST) & ((half & 1) != 0)) | (value != value), alone, bits)
    else:
        size = half & 0x7FFF
        magnitude = _magnitude_of_fp16(half)
        alone = magnitude.to(tl.int32, bitcast=True)
        fixed = magnitude + left.to(tl.float32) * PER_UNIT
        bits = tl.where(size < LINEAR, fixed.to(tl.int32, bitcast=True), alone + left)
        again = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        foreign = (again != size) | (size >= HALF_INFINITY) | ((size < LINEAR) & (left < -MOST))
        bits = tl.where(foreign, alone, bits) | (half & -0x8000) << 16
    return bits.to(tl.float32, bitcast=True)


@inlined
def encode(main, MODEL_DTYPE: tl.constexpr):
    """Return the model param's bits, sign-extended, and the remainder, both int32."""
    magnitude_bits = main.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if MODEL_DTYPE == tl.bfloat16:
        half = bits_as_bf16(main)
        left = tl.minimum(magnitude_bits - ((half & 0x7FFF) << 16), MOST)
        left = tl.where(main == main, left, 0)
    else:
        half = main.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        magnitude = _magnitude_of_fp16(half)
        coarse = (half & 0x7FFF) < LINEAR
        fixed = nearest(tl.where(coarse, (tl.abs(main) - magnitude) * UNIT, 0))
        fixed = tl.minimum(tl.maximum(fixed, -MOST), MOST)
        left = tl.where(coarse, fixed, magnitude_bits - magnitude.to(tl.int32, bitcast=True))
        left = tl.where((half & 0x7FFF) >= HALF_INFINITY, 0, left)
    return half, left


@inlined
def main_chunks(row, start, MODEL_DTYPE: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr):
    """Return pointers to the chunk's main params, or remainders where HELD, and to its model params."""
    if HELD:
        main_chunk = chunk_of(row, MAIN, start, tl.int16, VECTOR)
        model_chunk = chunk_of(row, MODEL, start, tl.int16, VECTOR)
    else:
        main_chunk = chunk_of(row, MAIN, start, tl.float32, VECTOR)
        model_chunk = chunk_of(row, MODEL, start, MODEL_DTYPE, VECTOR)
    return main_chunk, model_chunk


@inlined
def read_main(main_chunk, model_chunk, offsets, mask, MODEL_DTYPE: tl.constexpr, HELD: tl.constexpr):
    """Return main params in fp32, then, where HELD, the model params' bits and the remainders that they are held as."""
    left = tl.load(main_chunk + offsets, mask=mask, other=0)
    half, main = left, left
    if HELD:
        left = left.to(tl.int32)
        half = tl.load(model_chunk + offsets, mask=mask, other=0).to(tl.int32)
        main = decode(half, left, MODEL_DTYPE)
    return main, half, left


@inlined
def write_main(
    main_chunk, model_chunk, offsets, value, half, left, mask, kept, overflow, MODEL_DTYPE: tl.constexpr,
    HELD: tl.constexpr, ROWS: tl.constexpr,
):
    """Write main params and their model params where ``kept``.

    Return ``overflow`` with another number than 0 where the rounding is not finite fp16.
    half, left: what :func:`read_main` returned beside the main params. Where HELD a finite number that would be inf in
    fp16 keeps them.
    """
    if HELD:
        rounded, remainder = encode(value, MODEL_DTYPE)
        if MODEL_DTYPE == tl.float16:
            large = (tl.abs(value) < OVERFLOW) == 0
            overflow = overflow_in(overflow, value, kept, ROWS)
            refused = large & (tl.abs(value) < float("inf"))
            rounded = tl.where(refused, half, rounded)
            remainder = tl.where(refused, left, remainder)
        tl.store(main_chunk + offsets, remainder.to(tl.int16), mask=kept)
        tl.store(model_chunk + offsets, rounded.to(tl.int16), mask=kept)
    else:
        write(main_chunk, offsets, value, kept)
        if MODEL_DTYPE is not None:
            write(model_chunk, offsets, value, kept)
        if MODEL_DTYPE == tl.float16:
            overflow = overflow_in(overflow, value, mask, ROWS)
    return overflow


@inlined
def found_in(overflow):
    """Return whether any element of a chunk overflows, 0 or 1."""
    return tl.minimum(sum_of(overflow), 1)


@inlined
def _hold_chunk(
    row, start, first, last, landed, MODEL_DTYPE: tl.constexpr, ENCODE: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    left_chunk, model_chunk = main_chunks(row, start, MODEL_DTYPE, True, VECTOR)
    main_chunk = chunk_of(row, STATE, start, tl.float32, VECTOR)
    overflow = tl.full((BLOCK,), 0, tl.int32)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < last
        main, half, left = read_main(left_chunk, model_chunk, offsets, mask, MODEL_DTYPE, True)
        if ENCODE:
            kept = offsets < last * landed
            main = read(main_chunk, offsets, mask)
            overflow = write_main(
                left_chunk, model_chunk, offsets, main, half, left, mask, kept, overflow, MODEL_DTYPE, True, False
            )
        else:
            write(main_chunk, offsets, main, mask)
    return found_in(overflow)


@triton.jit(do_not_specialize=POINTERS)
def hold_kernel(
    rows, chunk_rows, counters, flags, found_inf, COLUMNS: tl.constexpr, MODEL_DTYPE: tl.constexpr,
    ENCODE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write main params or, to ENCODE them, model params and remainders, unless ``found_inf`` is set, and flags."""
    index, _, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    landed = (tl.load(found_inf) == 0).to(tl.int32)
    whole = whole_vectors(row, length, UPDATE_VECTOR)
    overflow = tl.full((), 0, tl.int32)
    if whole > 0:
        overflow |= _hold_chunk(row, start, 0, whole, landed, MODEL_DTYPE, ENCODE, BLOCK, UPDATE_VECTOR)
    if whole < length:
        overflow |= _hold_chunk(row, start, whole, length, landed, MODEL_DTYPE, ENCODE, BLOCK // NARROWER, 1)
    if ENCODE:
        arrive(row, chunk_rows, counters + index, flags, overflow, CHUNK)
