"""Triton kernels that reach all tensors of a call through a :class:`megascale.kernels.triton.device_table.DeviceTable`.

One program works on one chunk: on the whole vectors of aligned rows, then, element by element, on what is left. All
arithmetic is fp32 in the order of the reference backend, with fp64 where the reference has it for scalars. Launch with
``enable_fp_fusion=False``: a multiplication and an addition fused into one rounding would give other bits than the
reference.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: SIM102, SIM108, SIM300 - these rules know Python, not what Triton compiles

import torch
import triton
import triton.language as tl

from megascale.kernels.protocol import FP16_OVERFLOW
from megascale.kernels.triton import device_table
from megascale.kernels.triton.chunks import chunk_at, chunk_of, locate, whole_vectors, whole_vectors_beside
from megascale.kernels.triton.decision import decide_kernel as decide_kernel
from megascale.kernels.triton.decision import rescale_kernel as rescale_kernel
from megascale.kernels.triton.decision import total_kernel as total_kernel
from megascale.kernels.triton.interpreter import INTERPRETED as INTERPRETED
from megascale.kernels.triton.interpreter import inlined, sum_of, sum_of_lanes

LANGUAGE_DTYPES = {None: None, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

NUMEL = tl.constexpr(device_table.NUMEL)
FIRST_CHUNK = tl.constexpr(device_table.FIRST_CHUNK)
SLOT = tl.constexpr(device_table.SLOT)
STEP = tl.constexpr(device_table.STEP)
# Order of an update's tensors in a row.
MAIN, MODEL, STATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
OVERFLOW = tl.constexpr(FP16_OVERFLOW)
UPDATE_VECTOR = tl.constexpr(device_table.VECTOR // 4)  # elements; main params are fp32
NARROWER = tl.constexpr(1 if INTERPRETED else 4)  # blocks of single elements are smaller: they need more registers

# Not specialized by alignment, so that one compiled kernel serves: single numbers are read from them.
POINTERS = [
    "rows",
    "chunk_rows",
    "counters",
    "grads",
    "flags",
    "found_inf",
    "coefficient",
    "lr",
    "arrivals",
    "partials",
    "stats",
]

# A kernel's arguments one to a line would be half of this file.
# fmt: off


@inlined
def _read(pointer, offsets, mask):
    """Return elements in fp32, 0 where masked."""
    return tl.load(pointer + offsets, mask=mask, other=0).to(tl.float32)


@inlined
def _round_to_bf16(value):
    """Round fp32 to the nearest bf16, ties to even; NaN stays NaN. The interpreter's own cast truncates."""
    bits = value.to(tl.int32, bitcast=True)
    high = bits >> 16
    high += ((bits & 0xFFFF) + 0x7FFF + (high & 1)) >> 16
    high = tl.where(value == value, high, 0x7FC0)
    return high.to(tl.int16).to(tl.bfloat16, bitcast=True)


@inlined
def _write(pointer, offsets, value, mask):
    """Round fp32 elements into a tensor."""
    if pointer.dtype.element_ty == tl.bfloat16:
        rounded = _round_to_bf16(value)
    else:
        rounded = value.to(pointer.dtype.element_ty)
    tl.store(pointer + offsets, rounded, mask=mask)


@inlined
def _round_into_model(model, offsets, value, mask, kept, overflow, MODEL_DTYPE: tl.constexpr):
    """Write main's rounding where ``kept``; return ``overflow`` with 1 where the rounding is not finite fp16."""
    if MODEL_DTYPE is not None:
        _write(model, offsets, value, kept)
    if MODEL_DTYPE == tl.float16:
        overflow = overflow | (mask & ((tl.abs(value) < OVERFLOW) == 0)).to(tl.int32)
    return overflow


@inlined
def _arrive(row, counter, flags, overflow, CHUNK: tl.constexpr):
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
        tl.store(flags + tl.load(row + SLOT), (counted >> 32 != 0).to(tl.uint8))
    return last


@inlined
def _adam_chunk(
    row, grad, start, first, last, landed, coefficient, decay, step_size, inv_correction2_sqrt, beta1, rest1, beta2,
    rest2, eps, weight_decay, MODEL_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, AVG_DTYPE: tl.constexpr,
    SQ_DTYPE: tl.constexpr, MAX_DTYPE: tl.constexpr, DECOUPLED: tl.constexpr, L2: tl.constexpr,
    MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    main_chunk = chunk_of(row, MAIN, start, tl.float32, VECTOR)
    model_chunk = chunk_of(row, MODEL, start, MODEL_DTYPE, VECTOR)
    grad_chunk = chunk_at(grad, start, GRAD_DTYPE, VECTOR)
    avg_chunk = chunk_of(row, STATE, start, AVG_DTYPE, VECTOR)
    sq_chunk = chunk_of(row, STATE + 1, start, SQ_DTYPE, VECTOR)
    max_chunk = chunk_of(row, STATE + 2, start, MAX_DTYPE, VECTOR)
    overflow = tl.full((BLOCK,), 0, tl.int32)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < last
        kept = offsets < last * landed
        main = _read(main_chunk, offsets, mask)
        g = _read(grad_chunk, offsets, mask) * coefficient
        if MAXIMIZE:
            g = -g
        p = main
        if DECOUPLED:
            p = main * decay
        elif L2:
            g = g + weight_decay * main
        exp_avg = beta1 * _read(avg_chunk, offsets, mask) + rest1 * g
        exp_avg_sq = beta2 * _read(sq_chunk, offsets, mask) + rest2 * g * g
        second = exp_avg_sq
        if MAX_DTYPE is not None:
            largest = _read(max_chunk, offsets, mask)
            second = tl.maximum(largest, exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
            _write(max_chunk, offsets, second, kept)
        _write(avg_chunk, offsets, exp_avg, kept)
        _write(sq_chunk, offsets, exp_avg_sq, kept)
        denominator = tl.sqrt_rn(second) * inv_correction2_sqrt + eps
        p = tl.where(kept, p - tl.div_rn(step_size * exp_avg, denominator), main)
        _write(main_chunk, offsets, p, kept)
        overflow = _round_into_model(model_chunk, offsets, p, mask, kept, overflow, MODEL_DTYPE)
    return tl.minimum(sum_of(overflow), 1)


@triton.jit(do_not_specialize=POINTERS)
def adam_kernel(
    rows, chunk_rows, counters, grads, flags, found_inf, coefficient, lr, beta1, rest1, beta2, rest2,
    log_beta1: tl.float64, log_beta2: tl.float64, eps, weight_decay, COLUMNS: tl.constexpr,
    MODEL_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, AVG_DTYPE: tl.constexpr, SQ_DTYPE: tl.constexpr,
    MAX_DTYPE: tl.constexpr, DECOUPLED: tl.constexpr, L2: tl.constexpr, MAXIMIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adam and AdamW: ``rest1`` is 1 - beta1, ``L2`` decay through the gradient, ``MAX_DTYPE`` amsgrad's or None."""
    index, slot, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    skipped = tl.load(found_inf)
    landed = (skipped == 0).to(tl.int32)
    scale = tl.load(coefficient)
    rate = tl.load(lr)
    count = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    step = tl.load(count)
    t = (step + 1).to(tl.float64)
    correction1 = 1 - tl.exp(t * log_beta1)
    inv_correction2_sqrt = (1 / tl.sqrt(1 - tl.exp(t * log_beta2))).to(tl.float32)
    step_size = (rate.to(tl.float64) / correction1).to(tl.float32)
    decay = (1 - rate * weight_decay).to(tl.float32)
    grad = tl.load(grads + slot)
    whole = whole_vectors_beside(grad, row, length, GRAD_DTYPE, UPDATE_VECTOR)
    overflow = tl.full((), 0, tl.int32)
    if whole > 0:
        overflow |= _adam_chunk(
            row, grad, start, 0, whole, landed, scale, decay, step_size, inv_correction2_sqrt, beta1, rest1, beta2,
            rest2, eps, weight_decay, MODEL_DTYPE, GRAD_DTYPE, AVG_DTYPE, SQ_DTYPE, MAX_DTYPE, DECOUPLED, L2, MAXIMIZE,
            BLOCK, UPDATE_VECTOR,
        )
    if whole < length:
        overflow |= _adam_chunk(
            row, grad, start, whole, length, landed, scale, decay, step_size, inv_correction2_sqrt, beta1, rest1, beta2,
            rest2, eps, weight_decay, MODEL_DTYPE, GRAD_DTYPE, AVG_DTYPE, SQ_DTYPE, MAX_DTYPE, DECOUPLED, L2, MAXIMIZE,
            BLOCK // NARROWER, 1,
        )
    if _arrive(row, counters + index, flags, overflow, CHUNK):
        tl.store(count, step + (1 - skipped))


@inlined
def _sgd_chunk(
    row, grad, start, first, last, landed, coefficient, rate, momentum, share, weight_decay, MODEL_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr, BUFFER_DTYPE: tl.constexpr, NESTEROV: tl.constexpr, L2: tl.constexpr,
    MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    main_chunk = chunk_of(row, MAIN, start, tl.float32, VECTOR)
    model_chunk = chunk_of(row, MODEL, start, MODEL_DTYPE, VECTOR)
    grad_chunk = chunk_at(grad, start, GRAD_DTYPE, VECTOR)
    buffer_chunk = chunk_of(row, STATE, start, BUFFER_DTYPE, VECTOR)
    overflow = tl.full((BLOCK,), 0, tl.int32)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < last
        kept = offsets < last * landed
        main = _read(main_chunk, offsets, mask)
        g = _read(grad_chunk, offsets, mask) * coefficient
        if MAXIMIZE:
            g = -g
        if L2:
            g = g + weight_decay * main
        if BUFFER_DTYPE is not None:
            velocity = momentum * _read(buffer_chunk, offsets, mask) + share * g
            _write(buffer_chunk, offsets, velocity, kept)
            if NESTEROV:
                g = g + momentum * velocity
            else:
                g = velocity
        p = tl.where(kept, main - rate * g, main)
        _write(main_chunk, offsets, p, kept)
        overflow = _round_into_model(model_chunk, offsets, p, mask, kept, overflow, MODEL_DTYPE)
    return tl.minimum(sum_of(overflow), 1)


@triton.jit(do_not_specialize=POINTERS)
def sgd_kernel(
    rows, chunk_rows, counters, grads, flags, found_inf, coefficient, lr, momentum, undampened, weight_decay,
    COLUMNS: tl.constexpr, MODEL_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, BUFFER_DTYPE: tl.constexpr,
    DAMPENED: tl.constexpr, NESTEROV: tl.constexpr, L2: tl.constexpr, MAXIMIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """SGD: ``undampened`` is 1 - dampening, ``BUFFER_DTYPE`` None without momentum; ``DAMPENED`` rows count steps."""
    index, slot, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    skipped = tl.load(found_inf)
    landed = (skipped == 0).to(tl.int32)
    scale = tl.load(coefficient)
    rate = tl.load(lr).to(tl.float32)
    share = tl.full((), 1.0, tl.float32)
    count = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    step = share
    if DAMPENED:
        step = tl.load(count)
        # torch's first momentum buffer is the gradient itself, not dampened.
        share = tl.where(step == 0, share, undampened)
    grad = tl.load(grads + slot)
    whole = whole_vectors_beside(grad, row, length, GRAD_DTYPE, UPDATE_VECTOR)
    overflow = tl.full((), 0, tl.int32)
    if whole > 0:
        overflow |= _sgd_chunk(
            row, grad, start, 0, whole, landed, scale, rate, momentum, share, weight_decay,
            MODEL_DTYPE, GRAD_DTYPE, BUFFER_DTYPE, NESTEROV, L2, MAXIMIZE, BLOCK, UPDATE_VECTOR,
        )
    if whole < length:
        overflow |= _sgd_chunk(
            row, grad, start, whole, length, landed, scale, rate, momentum, share, weight_decay,
            MODEL_DTYPE, GRAD_DTYPE, BUFFER_DTYPE, NESTEROV, L2, MAXIMIZE, BLOCK // NARROWER, 1,
        )
    last = _arrive(row, counters + index, flags, overflow, CHUNK)
    if DAMPENED:
        if last:
            tl.store(count, step + (1 - skipped))


@inlined
def _lion_chunk(
    row, grad, start, first, last, landed, coefficient, rate, decay, beta1, rest1, beta2, rest2,
    MODEL_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, AVG_DTYPE: tl.constexpr, MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    main_chunk = chunk_of(row, MAIN, start, tl.float32, VECTOR)
    model_chunk = chunk_of(row, MODEL, start, MODEL_DTYPE, VECTOR)
    grad_chunk = chunk_at(grad, start, GRAD_DTYPE, VECTOR)
    avg_chunk = chunk_of(row, STATE, start, AVG_DTYPE, VECTOR)
    overflow = tl.full((BLOCK,), 0, tl.int32)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < last
        kept = offsets < last * landed
        main = _read(main_chunk, offsets, mask)
        g = _read(grad_chunk, offsets, mask) * coefficient
        if MAXIMIZE:
            g = -g
        average = _read(avg_chunk, offsets, mask)
        blend = beta1 * average + rest1 * g
        direction = (blend > 0).to(tl.float32) - (blend < 0).to(tl.float32)
        p = tl.where(kept, main * decay - rate * direction, main)
        _write(avg_chunk, offsets, beta2 * average + rest2 * g, kept)
        _write(main_chunk, offsets, p, kept)
        overflow = _round_into_model(model_chunk, offsets, p, mask, kept, overflow, MODEL_DTYPE)
    return tl.minimum(sum_of(overflow), 1)


@triton.jit(do_not_specialize=POINTERS)
def lion_kernel(
    rows, chunk_rows, counters, grads, flags, found_inf, coefficient, lr, beta1, rest1, beta2, rest2, weight_decay,
    COLUMNS: tl.constexpr, MODEL_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, AVG_DTYPE: tl.constexpr,
    MAXIMIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):
    """Lion: ``rest1`` is 1 - beta1."""
    index, slot, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    landed = (tl.load(found_inf) == 0).to(tl.int32)
    scale = tl.load(coefficient)
    rate = tl.load(lr)
    decay = (1 - rate * weight_decay).to(tl.float32)
    grad = tl.load(grads + slot)
    whole = whole_vectors_beside(grad, row, length, GRAD_DTYPE, UPDATE_VECTOR)
    overflow = tl.full((), 0, tl.int32)
    if whole > 0:
        overflow |= _lion_chunk(
            row, grad, start, 0, whole, landed, scale, rate.to(tl.float32), decay, beta1, rest1, beta2, rest2,
            MODEL_DTYPE, GRAD_DTYPE, AVG_DTYPE, MAXIMIZE, BLOCK, UPDATE_VECTOR,
        )
    if whole < length:
        overflow |= _lion_chunk(
            row, grad, start, whole, length, landed, scale, rate.to(tl.float32), decay, beta1, rest1, beta2, rest2,
            MODEL_DTYPE, GRAD_DTYPE, AVG_DTYPE, MAXIMIZE, BLOCK // NARROWER, 1,
        )
    _arrive(row, counters + index, flags, overflow, CHUNK)


@inlined
def _write_back_chunk(
    row, start, first, last, MODEL_DTYPE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    main_chunk = chunk_of(row, MAIN, start, tl.float32, VECTOR)
    model_chunk = chunk_of(row, MODEL, start, MODEL_DTYPE, VECTOR)
    overflow = tl.full((BLOCK,), 0, tl.int32)
    for begin in range(first, last, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < last
        main = _read(main_chunk, offsets, mask)
        overflow = _round_into_model(model_chunk, offsets, main, mask, mask, overflow, MODEL_DTYPE)
    return tl.minimum(sum_of(overflow), 1)


@triton.jit(do_not_specialize=POINTERS)
def write_back_kernel(
    rows, chunk_rows, counters, flags, COLUMNS: tl.constexpr, MODEL_DTYPE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round main params into their model params."""
    index, _, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    whole = whole_vectors(row, length, UPDATE_VECTOR)
    overflow = tl.full((), 0, tl.int32)
    if whole > 0:
        overflow |= _write_back_chunk(row, start, 0, whole, MODEL_DTYPE, BLOCK, UPDATE_VECTOR)
    if whole < length:
        overflow |= _write_back_chunk(row, start, whole, length, MODEL_DTYPE, BLOCK // NARROWER, 1)
    _arrive(row, counters + index, flags, overflow, CHUNK)


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
        g = _read(grad_chunk, offsets, mask)
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
        g = _read(grad_chunk, offsets, offsets < length)
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
    whole = whole_vectors_beside(grad, row, length, GRAD_DTYPE, VECTOR)
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
    grad = tl.load(grads + slot)
    squares, non_finite, zeros = _measure_chunk(row, grad, start, length, GRAD_DTYPE, COUNT_ZEROS, BLOCK)
    out = stats + tl.load(row + SLOT) * 3
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
