"""Triton kernels of the decision and the loss scale: one program, on a few numbers.

Launch with ``enable_fp_fusion=False``, as in :mod:`megascale.kernels.triton.kernels`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

from megascale.kernels.decision import LARGEST_SUM_SQUARES, REPLICA_TOLERANCE, Statistic
from megascale.kernels.triton.interpreter import sum_of, sum_of_lanes

SUM_SQUARES, NON_FINITE, ZEROS, ERRORS, CONTRAST, SCALED_RANKS = (tl.constexpr(int(index)) for index in Statistic)
LARGEST = tl.constexpr(LARGEST_SUM_SQUARES)
TOLERANCE = tl.constexpr(REPLICA_TOLERANCE)
TO_WHOLE = tl.constexpr(1.5 * 2.0**52)  # a number added to it in fp64, below 2**51, keeps no fraction


@triton.jit(
    do_not_specialize=[
        "sum_squares",
        "non_finite",
        "zeros",
        "shares",
        "contrasts",
        "errors",
        "vector",
        "stride",
        "num_tensors",
        "scaled",
    ]
)
def total_kernel(
    sum_squares,
    non_finite,
    zeros,
    shares,
    contrasts,
    errors,
    vector,
    stride: tl.int64,
    num_tensors: tl.int64,
    scaled: tl.float64,
    COUNT_ZEROS: tl.constexpr,
    COMPARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a rank's statistics to ``vector``, fp64, shape [NUM_STATISTICS].

    ``stride``: elements from one tensor's number to the next in each of the first three arguments, all fp64.
    """
    squares = tl.full((BLOCK,), 0, tl.float64)
    beyond = tl.full((BLOCK,), 0, tl.float64)
    nothing = tl.full((BLOCK,), 0, tl.float64)
    contrast = tl.full((BLOCK,), 0, tl.float64)
    for begin in range(0, num_tensors, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        mask = offsets < num_tensors
        share = tl.load(shares + offsets, mask=mask, other=0)
        square = tl.load(sum_squares + offsets * stride, mask=mask, other=0)
        squares += square * share
        beyond += tl.load(non_finite + offsets * stride, mask=mask, other=0)
        if COUNT_ZEROS:
            nothing += tl.load(zeros + offsets * stride, mask=mask, other=0) * share
        if COMPARES:
            contrast += square * tl.load(contrasts + offsets, mask=mask, other=0)
    tl.store(vector + SUM_SQUARES, sum_of_lanes(squares, BLOCK, 1))
    tl.store(vector + NON_FINITE, sum_of(beyond))
    tl.store(vector + ZEROS, sum_of_lanes(nothing, BLOCK, 1) if COUNT_ZEROS else float("nan"))
    tl.store(vector + ERRORS, tl.load(errors))
    tl.store(vector + CONTRAST, sum_of_lanes(contrast, BLOCK, 1))
    tl.store(vector + SCALED_RANKS, scaled)


@triton.jit(do_not_specialize=["vector", "scale", "numbers", "num_zeros", "success"])
def decide_kernel(
    vector,
    scale,
    numbers,
    num_zeros,
    success,
    clip_grad: tl.float64,
    epsilon: tl.float64,
    most_norm: tl.float64,
    SCALED: tl.constexpr,
    CLIPS: tl.constexpr,
):
    """Write found_inf, coefficient, grad_norm and overflow to ``numbers``, fp32, shape [4]; zeros, fp64; success."""
    sum_squares = tl.load(vector + SUM_SQUARES)
    found = ((sum_squares <= LARGEST) == 0) | (tl.load(vector + NON_FINITE) > 0) | (tl.load(vector + ERRORS) != 0)
    found = found | (tl.abs(tl.load(vector + CONTRAST)) > tl.full((), TOLERANCE, tl.float64) * sum_squares)
    found = found | (tl.load(vector + SCALED_RANKS) <= 0)
    unscale = tl.full((), 1, tl.float64)
    if SCALED:
        unscale = (unscale / tl.load(scale).to(tl.float64)).to(tl.float32).to(tl.float64)
    norm = tl.sqrt(sum_squares) * unscale
    coefficient = unscale
    if CLIPS:
        clip = tl.full((), 1, tl.float64) / (norm + epsilon) * clip_grad  # as torch divides a number by a tensor
        coefficient = unscale * tl.where(clip > 1, 1, clip)
    grad_norm = norm.to(tl.float32)
    is_skipped = found | (grad_norm > tl.cast(most_norm, tl.float32))
    tl.store(numbers, is_skipped.to(tl.float32))
    tl.store(numbers + 1, coefficient.to(tl.float32))
    tl.store(numbers + 2, grad_norm)
    tl.store(numbers + 3, found.to(tl.float32))
    tl.store(success, is_skipped == 0)
    tl.store(num_zeros, (tl.load(vector + ZEROS) + TO_WHOLE) - TO_WHOLE)


@triton.jit(
    do_not_specialize=["found_inf", "scale", "growth_tracker", "hysteresis_tracker", "growth_interval", "hysteresis"]
)
def rescale_kernel(
    found_inf,
    scale,
    growth_tracker,
    hysteresis_tracker,
    min_scale,
    max_scale,
    growth_factor: tl.float64,
    backoff_factor: tl.float64,
    growth_interval: tl.int64,
    hysteresis: tl.int64,
    EACH_CLEAN_STEP: tl.constexpr,
    FP64_PRODUCTS: tl.constexpr,
):
    """Update ``scale``, fp32, and the trackers, int64, after one step."""
    found = tl.load(found_inf) != 0
    before = tl.load(scale)
    left = tl.load(hysteresis_tracker)
    clean_steps = tl.load(growth_tracker) + 1
    grows = clean_steps >= growth_interval
    if FP64_PRODUCTS:
        grown = (before.to(tl.float64) * growth_factor).to(tl.float32)
        backed_off = (before.to(tl.float64) * backoff_factor).to(tl.float32)
    else:
        grown = before * tl.cast(growth_factor, tl.float32)
        backed_off = before * tl.cast(backoff_factor, tl.float32)
    after_clean = tl.where(grows & (grown <= LARGEST), tl.minimum(grown, max_scale), before)
    left_after_clean = tl.where(grows | EACH_CLEAN_STEP, hysteresis, left)
    left_after_inf = tl.maximum(left - 1, 0)
    after_inf = tl.where(left_after_inf == 0, tl.maximum(backed_off, min_scale), before)
    tl.store(scale, tl.where(found, after_inf, after_clean))
    tl.store(growth_tracker, tl.where(found | grows, 0, clean_steps))
    tl.store(hysteresis_tracker, tl.where(found, left_after_inf, left_after_clean))
