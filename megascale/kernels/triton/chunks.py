"""Reads of tables and gradients' addresses in kernels: from a program's number to the memory of its chunk."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton.language as tl

from megascale.kernels.triton import device_table
from megascale.kernels.triton.interpreter import inlined

NUMEL = tl.constexpr(device_table.NUMEL)
FIRST_CHUNK = tl.constexpr(device_table.FIRST_CHUNK)
ALIGNED = tl.constexpr(device_table.ALIGNED)
TENSORS = tl.constexpr(device_table.TENSORS)
MOST_BYTES = tl.constexpr(device_table.VECTOR)

# fmt: off


@inlined
def locate(rows, chunk_rows, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """Return this program's row as a number, as an index in the call and as a pointer, the chunk's first element,
    int64, and its length.
    """
    program = tl.program_id(0)
    both = tl.load(chunk_rows + program)
    index = both & 0xFFFFFFFF
    row = rows + index * COLUMNS
    start = (program - tl.load(row + FIRST_CHUNK)) * CHUNK
    length = tl.minimum(tl.load(row + NUMEL) - start, CHUNK).to(tl.int32)
    return index, both >> 32, row, start, length


@inlined
def whole_vectors(row, length, WHOLE: tl.constexpr):
    """Return how many elements of the chunk, from its first one on, are aligned, in whole runs of WHOLE elements."""
    return length * tl.load(row + ALIGNED).to(tl.int32) // WHOLE * WHOLE


@inlined
def whole_vectors_beside(grad, row, length, GRAD_DTYPE: tl.constexpr, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """Return the same where the gradient at address ``grad`` is read with the row's tensors."""
    BYTES: tl.constexpr = VECTOR * GRAD_DTYPE.primitive_bitwidth // 8
    is_aligned = (grad & ((MOST_BYTES if BYTES > MOST_BYTES else BYTES) - 1)) == 0
    return whole_vectors(row, length, WHOLE) * is_aligned.to(tl.int32)


@inlined
def chunk_at(address, start, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Return a pointer to the chunk's first element in the tensor at an address.

    VECTOR is the number of elements of one access, of at most 16 bytes. An update uses the same number for every
    tensor, 8 bytes of a 16-bit one: otherwise Triton would convert between their layouts through shared memory.
    """
    pointer = address.to(tl.pointer_type(DTYPE))
    BYTES: tl.constexpr = VECTOR * DTYPE.primitive_bitwidth // 8
    if VECTOR > 1:
        pointer = tl.multiple_of(pointer, MOST_BYTES if BYTES > MOST_BYTES else BYTES)
    return pointer + start


@inlined
def chunk_of(row, TENSOR: tl.constexpr, start, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Return a pointer to the chunk's first element in a row's tensor. DTYPE None: there is no such tensor."""
    pointer = row
    if DTYPE is not None:
        pointer = chunk_at(tl.load(row + TENSORS + TENSOR), start, DTYPE, VECTOR)
    return pointer
