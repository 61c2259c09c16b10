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
"""

import torch
from torch import Tensor

from megascale.kernels.protocol import FP16_OVERFLOW, HeldParams

REMAINDER_DTYPE = torch.int16
_MOST = 32767
_MAGNITUDE, _SIGN, _HALF_MAGNITUDE = 0x7FFFFFFF, -0x80000000, 0x7FFF
_FP16_INF = 0x7C00
_FP16_LINEAR = 0x0100
"""The bits of 2**-16 in fp16: below, remainders are of fixed point."""
_UNIT = 2.0**40
_WORD, _INDEX_STRIDE, _INDEX_START = 0xFFFFFFFF, 0x9E3779B1, 0x85EBCA77
_FINGERPRINTED = 1 << 20
"""Elements of a fingerprint that are summed at a time, in int64."""


def encode(main: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the model param in ``dtype``, fp16 or bf16, and the int16 remainder, in the shape of ``main``.

    ``main``: fp32.
    """
    model = main.to(dtype)
    bits = main.view(torch.int32) & _MAGNITUDE
    half = model.view(torch.int16).to(torch.int32) & _HALF_MAGNITUDE
    if dtype == torch.bfloat16:
        remainder = torch.where(main.isnan(), 0, (bits - (half << 16)).clamp_(max=_MOST))
    else:
        magnitude = model.abs().to(torch.float32)
        fixed = ((main.abs() - magnitude) * _UNIT).round_().clamp_(-_MOST, _MOST)
        coarse = (half < _FP16_LINEAR) & ~main.isnan()
        exact = bits - magnitude.view(torch.int32)
        remainder = torch.where(coarse, torch.where(coarse, fixed, 0.0).to(torch.int32), exact)
        remainder = torch.where(half >= _FP16_INF, 0, remainder)
    return model, remainder.to(REMAINDER_DTYPE)


def decode(model: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 main param that a model param in fp16 or bf16 and its int16 remainder stand for."""
    offset = remainder.to(torch.int32)
    half = model.view(torch.int16).to(torch.int32)
    if model.dtype == torch.bfloat16:
        return ((half << 16) + offset).view(torch.float32)
    magnitude = model.abs().to(torch.float32)
    exact = magnitude.view(torch.int32) + offset
    fixed = (magnitude + offset.to(torch.float32) * (1 / _UNIT)).view(torch.int32)
    bits = torch.where(half & _HALF_MAGNITUDE < _FP16_LINEAR, fixed, exact)
    return torch.where(half < 0, bits | _SIGN, bits).view(torch.float32)


def fingerprint(model: Tensor) -> Tensor:
    """Return a number that tells whether others have written a 16-bit model param: int64, 0-d, below 2**32.

    The sum over elements of their bits times an odd weight, which depends on the index, modulo 2**32: another value of
    one element always makes another number.
    """
    total = torch.zeros((), dtype=torch.int64, device=model.device)
    flat = model.detach().reshape(-1).view(torch.int16)
    for start in range(0, len(flat), _FINGERPRINTED):
        bits = flat[start : start + _FINGERPRINTED].to(torch.int64) & 0xFFFF
        index = torch.arange(start, start + len(bits), dtype=torch.int64, device=model.device)
        total += (bits * ((index * _INDEX_STRIDE + _INDEX_START) & _WORD | 1)).sum()
    return total & _WORD


class TorchRemainders:
    """Main params held as remainders, in plain tensor code. Base of all backends."""

    fuses_remainders = False

    def decode_(self, held: HeldParams) -> None:
        """See :class:`megascale.kernels.Backend`."""
        for model, remainder, main in zip(held.models, held.remainders, held.mains, strict=True):
            main.copy_(decode(model, remainder))

    def encode_(self, held: HeldParams, found_inf: Tensor) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        skipped = (found_inf != 0).reshape(())
        flags = []
        for main, model, remainder, mark in zip(held.mains, *held.beside, strict=True):
            rounded, left = encode(main, model.dtype)
            is_large = torch.zeros_like(main, dtype=torch.bool)
            if model.dtype == torch.float16:
                is_large = ~(main.abs() < FP16_OVERFLOW)
            keeps = skipped | (is_large & main.isfinite())
            model.copy_(torch.where(keeps, model, rounded))
            remainder.copy_(torch.where(keeps, remainder, left))
            mark.copy_(fingerprint(model))
            flags.append(is_large.any() & ~skipped)
        return torch.stack(flags)
