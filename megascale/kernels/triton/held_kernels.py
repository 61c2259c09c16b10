"""Triton kernels that decode main params held as remainders, and encode them, for updates in plain tensor code.

See :mod:`megascale.kernels.triton.kernels` for what holds of all kernels over tensors. Rows have the remainder, the
model param and the main param.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

from megascale.kernels.triton import device_table
from megascale.kernels.triton.chunks import chunk_of, locate, whole_vectors
from megascale.kernels.triton.elements import NARROWER, STATE, arrive, read, write
from megascale.kernels.triton.interpreter import inlined
from megascale.kernels.triton.remainders import found_in, main_chunks, read_main, write_main

VECTOR_WIDTH = tl.constexpr(device_table.UPDATE_VECTOR)
POINTERS = ["rows", "chunk_rows", "counters", "flags", "found_inf"]

# fmt: off


@inlined
def _decode_chunk(row, start, first, last, MODEL_DTYPE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    left_chunk, model_chunk = main_chunks(row, start, MODEL_DTYPE, True, VECTOR)
    main_chunk = chunk_of(row, STATE, start, tl.float32, VECTOR)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < last
        main, _, _ = read_main(left_chunk, model_chunk, offsets, mask, MODEL_DTYPE, True)
        write(main_chunk, offsets, main, mask)


@triton.jit(do_not_specialize=POINTERS)
def decode_kernel(
    rows, chunk_rows, counters, COLUMNS: tl.constexpr, MODEL_DTYPE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write main params."""
    _, _, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    whole = whole_vectors(row, length, VECTOR_WIDTH)
    if whole > 0:
        _decode_chunk(row, start, 0, whole, MODEL_DTYPE, BLOCK, VECTOR_WIDTH)
    if whole < length:
        _decode_chunk(row, start, whole, length, MODEL_DTYPE, BLOCK // NARROWER, 1)


@inlined
def _encode_chunk(
    row, start, first, last, landed, MODEL_DTYPE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    left_chunk, model_chunk = main_chunks(row, start, MODEL_DTYPE, True, VECTOR)
    main_chunk = chunk_of(row, STATE, start, tl.float32, VECTOR)
    overflow = tl.full((BLOCK,), 0, tl.int32)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < last
        kept = offsets < last * landed
        main = read(main_chunk, offsets, mask)
        _, half, left = read_main(left_chunk, model_chunk, offsets, mask, MODEL_DTYPE, True)
        overflow = write_main(
            left_chunk, model_chunk, offsets, main, half, left, mask, kept, overflow, MODEL_DTYPE, True, False
        )
    return found_in(overflow)


@triton.jit(do_not_specialize=POINTERS)
def encode_kernel(
    rows, chunk_rows, counters, flags, found_inf, COLUMNS: tl.constexpr, MODEL_DTYPE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write model params and remainders, unless ``found_inf`` is set."""
    index, _, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    landed = (tl.load(found_inf) == 0).to(tl.int32)
    whole = whole_vectors(row, length, VECTOR_WIDTH)
    overflow = tl.full((), 0, tl.int32)
    if whole > 0:
        overflow |= _encode_chunk(row, start, 0, whole, landed, MODEL_DTYPE, BLOCK, VECTOR_WIDTH)
    if whole < length:
        overflow |= _encode_chunk(row, start, whole, length, landed, MODEL_DTYPE, BLOCK // NARROWER, 1)
    arrive(row, counters + index, flags, overflow, CHUNK)
