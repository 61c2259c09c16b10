"""From a program's number to the elements of its chunk: reads of tables, reads in fp32, rounded writes, and arrival."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton.language as tl

from megascale.kernels.protocol import FP16_OVERFLOW
from megascale.kernels.triton import device_table
from megascale.kernels.triton.interpreter import INTERPRETED, inlined, sum_of

_COLUMNS = map(tl.constexpr, device_table.COLUMNS)
NUMEL, FIRST_CHUNK, ALIGNED, STEP, START, GROUP, FIRST_SCALE, SECOND_SCALE, TENSORS = _COLUMNS
MOST_BYTES = tl.constexpr(device_table.VECTOR)
# Order of an update's tensors in a row.
MAIN, MODEL, STATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
OVERFLOW = tl.constexpr(FP16_OVERFLOW)
NARROWER = tl.constexpr(1 if INTERPRETED else 4)  # blocks of single elements are smaller: they need more registers

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
def grad_of(grads, slot, length):
    """Return the address of the row's gradient, and the length again: 0 where the gradient is missing, at address 0."""
    grad = tl.load(grads + slot)
    return grad, length * (grad != 0).to(tl.int32)


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


@inlined
def read(pointer, offsets, mask):
    """Return elements in fp32, 0 where masked."""
    return tl.load(pointer + offsets, mask=mask, other=0).to(tl.float32)


@inlined
def bits_as_bf16(value):
    """Round fp32 to the nearest bf16, ties to even; NaN stays NaN. Return its bits, sign-extended to int32."""
    bits = value.to(tl.int32, bitcast=True)
    high = bits >> 16
    high += ((bits & 0xFFFF) + 0x7FFF + (high & 1)) >> 16
    return tl.where(value == value, high, 0x7FC0)


@inlined
def write(pointer, offsets, value, mask):
    """Round fp32 elements into a tensor."""
    if pointer.dtype.element_ty == tl.bfloat16:
        # The interpreter's own cast truncates.
        rounded = bits_as_bf16(value).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = value.to(pointer.dtype.element_ty)
    tl.store(pointer + offsets, rounded, mask=mask)


@inlined
def overflow_in(overflow, value, mask, ROWS: tl.constexpr):
    """Return ``overflow`` with another number than 0 for elements, or ROWS of them, that are not finite fp16."""
    found = (mask & ((tl.abs(value) < OVERFLOW) == 0)).to(tl.int32)
    return overflow | (sum_of(found, 1) if ROWS else found)


@inlined
def arrive(row, chunk_rows, counter, flags, overflow, CHUNK: tl.constexpr):
    """Count this chunk as done. Return whether it is its row's last one; if so, the row's flag has been written.

    All programs of a row have read the step count before the last one arrives, so that it may write the next. The
    counter holds arrivals in its low half and overflowing chunks in its high half, and is 0 again afterwards.
    """
    tl.debug_barrier()
    mine = 1 + (overflow.to(tl.int64) << 32)
    counted = tl.atomic_add(counter, mine) + mine
    last = (counted & 0xFFFFFFFF) == tl.maximum((tl.load(row + NUMEL) + (CHUNK - 1)) // CHUNK, 1)
    if last:
        tl.store(counter, tl.full((), 0, tl.int64))
        slot = tl.load(chunk_rows + tl.program_id(0)) >> 32  # locate's: kept, it would take registers in the loops
        tl.store(flags + slot, (counted >> 32 != 0).to(tl.uint8))
    return last
