"""Main params as remainders: a 16-bit model param and an int16 beside it stand for the fp32 main param.

The model param is the main param rounded to nearest, ties to even; the remainder is what rounding took away, counted
in the direction of magnitude. All operations are exact on integers or IEEE ones on fp32: backends have the same bits.

bf16: the difference of the bit patterns of ``|main|`` and ``|model|``, at most 32767. Every fp32 number is held exactly
but 32,640: those halfway between two bf16 numbers of which the one nearer to 0 is even. They move by one ulp towards 0.

fp16, ``|model| >= 2**-16``: the difference of bit patterns, always exact. Below: ``|main| - |model|`` in units of
2**-40, rounded to nearest and within -32767 and 32767. Both bounds are needed: at a distance of 32768 units the decoded
number would round to another model param. The error is at most 2**-41, and 2**-40 halfway between two model params.

A model param of inf is decoded to inf in fp16, whatever the main param was: callers refuse ``|main| >= 65520`` before
they write. In bf16 finite main params that round to inf are held exactly. NaN becomes NaN.

Every pair is decoded, also one that no encoding produces, as after a write to the model param that nobody noticed: then
the model param alone is the main param. So whatever the remainder, the decoded number rounds to the model param.
"""

import torch
from torch import Tensor

REMAINDER_DTYPE = torch.int16
MOST = 32767
_MAGNITUDE, _SIGN, _HALF_MAGNITUDE = 0x7FFFFFFF, -0x80000000, 0x7FFF
FP16_INF = 0x7C00
FP16_LINEAR = 0x0100
"""The bits of 2**-16 in fp16: below, remainders are of fixed point."""
UNIT = 2.0**40


def encode(main: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the model param in ``dtype``, fp16 or bf16, and the int16 remainder, in the shape of ``main``.

    ``main``: fp32.
    """
    model = main.to(dtype)
    bits = main.view(torch.int32) & _MAGNITUDE
    half = model.view(torch.int16).to(torch.int32) & _HALF_MAGNITUDE
    if dtype == torch.bfloat16:
        remainder = torch.where(main.isnan(), 0, (bits - (half << 16)).clamp_(max=MOST))
    else:
        magnitude = model.abs().to(torch.float32)
        fixed = ((main.abs() - magnitude) * UNIT).round_().clamp_(-MOST, MOST)
        coarse = (half < FP16_LINEAR) & ~main.isnan()
        exact = bits - magnitude.view(torch.int32)
        remainder = torch.where(coarse, torch.where(coarse, fixed, 0.0).to(torch.int32), exact)
        remainder = torch.where(half >= FP16_INF, 0, remainder)
    return model, remainder.to(REMAINDER_DTYPE)


def decode(model: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 main param that a model param in fp16 or bf16 and its int16 remainder stand for.

    Of a pair that :func:`encode` does not return, it is the model param.
    """
    offset = remainder.to(torch.int32)
    half = model.view(torch.int16).to(torch.int32)
    if model.dtype == torch.bfloat16:
        alone = half << 16
        bits = alone + offset
        # A halfway number rounds to this one only where this one is even. Below 0 and above inf, bits are NaN's.
        is_foreign = ((offset < -MOST) & (half & 1 != 0)) | bits.view(torch.float32).isnan()
        return torch.where(is_foreign, alone, bits).view(torch.float32)
    magnitude = model.abs().to(torch.float32)
    exact = magnitude.view(torch.int32) + offset
    fixed = (magnitude + offset.to(torch.float32) * (1 / UNIT)).view(torch.int32)
    size = half & _HALF_MAGNITUDE
    is_fixed = size < FP16_LINEAR
    bits = torch.where(is_fixed, fixed, exact)
    # Magnitudes below 0 have another sign than their model param's, which is 0 here.
    rounds_elsewhere = bits.view(torch.float32).to(torch.float16).view(torch.int16) != size
    is_foreign = rounds_elsewhere | (size >= FP16_INF) | (is_fixed & (offset < -MOST))
    bits = torch.where(is_foreign, magnitude.view(torch.int32), bits)
    return torch.where(half < 0, bits | _SIGN, bits).view(torch.float32)
