"""Triton kernels that reach all tensors of a call through a :class:`megascale.kernels.triton.device_table.DeviceTable`.

One kernel updates by any rule, as native.c's does. One program works on one chunk: on the whole vectors of aligned
rows, then, element by element, on what is left. With 8-bit moments the first loop takes whole blocks only, of a step
that landed, and so has no masks. All arithmetic is fp32 in the order of the reference backend, with fp64 where the
reference has it for scalars. Launch with ``enable_fp_fusion=False``: a multiplication and an addition fused into one
rounding would give other bits than the reference.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: SIM102 - it knows Python, not what Triton compiles

import triton
import triton.language as tl

from megascale.kernels.triton import device_table
from megascale.kernels.triton.chunks import (
    FIRST_SCALE,
    GROUP,
    NARROWER,
    SECOND_SCALE,
    STATE,
    STEP,
    arrive,
    chunk_at,
    chunk_of,
    grad_of,
    locate,
    read,
    whole_vectors_beside,
    write,
)
from megascale.kernels.triton.codes import (
    before,
    first_dither,
    offsets_of,
    read_moments,
    scales_of,
    write_moments,
    zeros_of,
)
from megascale.kernels.triton.decision import decide_kernel as decide_kernel
from megascale.kernels.triton.decision import rescale_kernel as rescale_kernel
from megascale.kernels.triton.decision import total_kernel as total_kernel
from megascale.kernels.triton.interpreter import INTERPRETED as INTERPRETED
from megascale.kernels.triton.interpreter import inlined
from megascale.kernels.triton.measure import measure_kernel as measure_kernel
from megascale.kernels.triton.remainders import UPDATE_VECTOR, found_in, main_chunks, read_main, write_main
from megascale.kernels.triton.remainders import hold_kernel as hold_kernel

# Triton's dtypes have the names of torch's.
LANGUAGE_DTYPES = {one: getattr(tl, str(one).removeprefix("torch.")) for one in device_table.DTYPES} | {None: None}

CODES_VECTOR = tl.constexpr(device_table.CODES_VECTOR)

# Not specialized by alignment, so that one compiled kernel serves: single numbers are read from them.
POINTERS = ["rows", "chunk_rows", "counters", "grads", "flags", "found_inf", "coefficient", "lrs", "weight_decays"]

# A kernel's arguments one to a line would be half of this file.
# fmt: off


@inlined
def _update_chunk(
    row, grad, start, first, last, landed, dither, coefficient, rate, decay, inv_correction2_sqrt, beta1, rest1, beta2,
    rest2, eps, weight_decay, RULE: tl.constexpr, MODEL_DTYPE: tl.constexpr, HELD: tl.constexpr, CODES: tl.constexpr,
    GRAD_DTYPE: tl.constexpr, AVG_DTYPE: tl.constexpr, SQ_DTYPE: tl.constexpr, MAX_DTYPE: tl.constexpr,
    DECOUPLED: tl.constexpr, NESTEROV: tl.constexpr, L2: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    main_chunk, model_chunk = main_chunks(row, start, MODEL_DTYPE, HELD, VECTOR)
    grad_chunk = chunk_at(grad, start, GRAD_DTYPE, VECTOR)
    avg_chunk = chunk_of(row, STATE, start, AVG_DTYPE, VECTOR)
    sq_chunk = chunk_of(row, STATE + 1, start, SQ_DTYPE, VECTOR)
    avg_scales = scales_of(row, FIRST_SCALE, start, AVG_DTYPE)
    sq_scales = scales_of(row, SECOND_SCALE, start, SQ_DTYPE)
    max_chunk = chunk_of(row, STATE + 2, start, MAX_DTYPE, VECTOR)
    overflow = zeros_of(BLOCK, CODES)
    # update_kernel takes codes as vectors in whole blocks of a step that landed only: every element is there and kept.
    end = None if CODES and VECTOR > 1 else last
    kept_end = None if end is None else last * landed
    for begin in range(first, last, BLOCK):
        offsets = offsets_of(begin, BLOCK, CODES)
        mask, kept = before(offsets, end), before(offsets, kept_end)
        main, half, left = read_main(main_chunk, model_chunk, offsets, mask, MODEL_DTYPE, HELD)
        g = read(grad_chunk, offsets, mask) * coefficient
        if MAXIMIZE:
            g = -g
        p = main
        if DECOUPLED:
            p = main * decay
        elif L2:
            g = g + weight_decay * main
        if RULE == "adam":
            exp_avg, exp_avg_sq = read_moments(
                avg_chunk, sq_chunk, avg_scales, sq_scales, begin, end, offsets, mask, AVG_DTYPE, SQ_DTYPE, BLOCK
            )
            exp_avg = beta1 * exp_avg + rest1 * g
            exp_avg_sq = beta2 * exp_avg_sq + rest2 * g * g
            second = exp_avg_sq
            if MAX_DTYPE is not None:
                largest = read(max_chunk, offsets, mask)
                second = tl.maximum(largest, exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
                write(max_chunk, offsets, second, kept)
            if not CODES:
                write(avg_chunk, offsets, exp_avg, kept)
                write(sq_chunk, offsets, exp_avg_sq, kept)
            denominator = tl.sqrt_rn(second) * inv_correction2_sqrt + eps
            p = p - tl.div_rn(rate * exp_avg, denominator)
        elif RULE == "lion":
            average = read(avg_chunk, offsets, mask)
            blend = beta1 * average + rest1 * g
            p = p - rate * ((blend > 0).to(tl.float32) - (blend < 0).to(tl.float32))
            write(avg_chunk, offsets, beta2 * average + rest2 * g, kept)
        else:
            if AVG_DTYPE is not None:
                velocity = beta1 * read(avg_chunk, offsets, mask) + rest1 * g
                write(avg_chunk, offsets, velocity, kept)
                g = g + beta1 * velocity if NESTEROV else velocity
            p = p - rate * g
        p = tl.where(kept, p, main)
        overflow = write_main(
            main_chunk, model_chunk, offsets, p, half, left, mask, kept, overflow, MODEL_DTYPE, HELD, CODES
        )
        if CODES:
            write_moments(
                avg_chunk, sq_chunk, avg_scales, sq_scales, begin, kept_end, offsets, mask, kept, exp_avg,
                exp_avg_sq, dither, AVG_DTYPE, SQ_DTYPE, BLOCK
            )
    return found_in(overflow)


@triton.jit(do_not_specialize=POINTERS)
def update_kernel(
    rows, chunk_rows, counters, grads, flags, found_inf, coefficient, lrs, weight_decays, beta1, rest1, beta2, rest2,
    log_beta1: tl.float64, log_beta2: tl.float64, eps, COLUMNS: tl.constexpr, RULE: tl.constexpr,
    MODEL_DTYPE: tl.constexpr, HELD: tl.constexpr, CODES: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    AVG_DTYPE: tl.constexpr, SQ_DTYPE: tl.constexpr, MAX_DTYPE: tl.constexpr, COUNTS: tl.constexpr,
    DECOUPLED: tl.constexpr, NESTEROV: tl.constexpr, L2: tl.constexpr, MAXIMIZE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The RULE "adam", "sgd" or "lion". ``lrs`` and ``weight_decays`` (fp64) have a number per param group.
    ``rest1`` is 1 - beta1; of SGD ``beta1`` is the momentum, ``rest1`` 1 - dampening. ``AVG_DTYPE``: of the first
    moment, None without momentum; ``SQ_DTYPE``, ``MAX_DTYPE``: of Adam's second moment and of amsgrad's largest, or
    None. ``L2``: decay through the gradient. ``COUNTS``: rows count steps.
    """
    index, slot, row, start, length = locate(rows, chunk_rows, COLUMNS, CHUNK)
    skipped = tl.load(found_inf)
    landed = (skipped == 0).to(tl.int32)
    scale = tl.load(coefficient)
    group = tl.load(row + GROUP)
    exact_rate = tl.load(lrs + group).to(tl.float64)
    exact_decay = tl.load(weight_decays + group)
    rate, weight_decay = exact_rate.to(tl.float32), exact_decay.to(tl.float32)
    decay = (1 - exact_rate * exact_decay).to(tl.float32)
    count = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    step = tl.load(count) if COUNTS else skipped
    inv_correction2_sqrt = rate
    if RULE == "adam":
        t = (step + 1).to(tl.float64)
        rate = (exact_rate / (1 - tl.exp(t * log_beta1))).to(tl.float32)
        inv_correction2_sqrt = (1 / tl.sqrt(1 - tl.exp(t * log_beta2))).to(tl.float32)
    if RULE == "sgd" and COUNTS:  # torch's first momentum buffer is the gradient itself, not dampened
        rest1 = tl.where(step == 0, 1.0, rest1)
    dither = first_dither(row, start, step, CODES)
    grad, length = grad_of(grads, slot, length)
    VECTOR: tl.constexpr = CODES_VECTOR if CODES else UPDATE_VECTOR
    WHOLE: tl.constexpr = BLOCK if CODES else UPDATE_VECTOR
    whole = whole_vectors_beside(grad, row, length, GRAD_DTYPE, VECTOR, WHOLE)
    whole = whole * landed if CODES else whole  # blocks without masks would be written
    overflow = tl.full((), 0, tl.int32)
    if whole > 0:
        overflow |= _update_chunk(
            row, grad, start, 0, whole, landed, dither, scale, rate, decay, inv_correction2_sqrt, beta1, rest1, beta2,
            rest2, eps, weight_decay, RULE, MODEL_DTYPE, HELD, CODES, GRAD_DTYPE, AVG_DTYPE, SQ_DTYPE, MAX_DTYPE,
            DECOUPLED, NESTEROV, L2, MAXIMIZE, BLOCK, VECTOR,
        )
    if whole < length:
        overflow |= _update_chunk(
            row, grad, start, whole, length, landed, dither, scale, rate, decay, inv_correction2_sqrt, beta1, rest1,
            beta2, rest2, eps, weight_decay, RULE, MODEL_DTYPE, HELD, CODES, GRAD_DTYPE, AVG_DTYPE, SQ_DTYPE, MAX_DTYPE,
            DECOUPLED, NESTEROV, L2, MAXIMIZE, BLOCK // NARROWER, 1,
        )
    last = arrive(row, chunk_rows, counters + index, flags, overflow, CHUNK)
    if COUNTS:
        if last:
            tl.store(count, step + (1 - skipped) * (grad != 0).to(tl.float32))
