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

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megascale.kernels.decision import Decision
from megascale.kernels.protocol import FP16_OVERFLOW, Operands, flags_at, runs_of

REMAINDER_DTYPE = torch.int16
MOST = 32767
_MAGNITUDE, _SIGN, _HALF_MAGNITUDE = 0x7FFFFFFF, -0x80000000, 0x7FFF
FP16_INF = 0x7C00
FP16_LINEAR = 0x0100
"""The bits of 2**-16 in fp16: below, remainders are of fixed point."""
UNIT = 2.0**40
DECODED_NUMEL = 1 << 20
"""Elements that are decoded at a time. A larger parameter is decoded alone, whole."""


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


class TorchRemainders:
    """Main params held as remainders, in plain tensor code. Base of all backends.

    Small parameters are decoded and encoded together, so that the number of kernels does not grow with them.
    """

    def decode_(self, operands: Operands) -> None:
        """See :class:`megascale.kernels.Backend`."""
        for indices in runs_of(operands.model, DECODED_NUMEL):
            part = operands.pick(indices)
            decoded = decode(_joined(part.model), _joined(part.remainder))
            torch._foreach_copy_(part.main, _parts(decoded, part.main))

    def encode_(self, operands: Operands, found_inf: Tensor) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        skipped = (found_inf != 0).reshape(())
        flags = [torch.zeros_like(skipped)] * len(operands.model)
        for indices in runs_of(operands.model, DECODED_NUMEL):
            part = operands.pick(indices)
            main, model, remainder = map(_joined, (part.main, part.model, part.remainder))
            rounded, left = encode(main, model.dtype)
            keeps = skipped
            if model.dtype == torch.float16:
                is_large = ~(main.abs() < FP16_OVERFLOW)
                keeps = skipped | (is_large & main.isfinite())
                overflowed = (_sums(is_large, part.model) > 0) & ~skipped
                for index, flag in zip(indices, overflowed.unbind(), strict=True):
                    flags[index] = flag
            torch._foreach_copy_(part.model, _parts(torch.where(keeps, model, rounded), part.model))
            torch._foreach_copy_(part.remainder, _parts(torch.where(keeps, remainder, left), part.remainder))
        return torch.stack(flags)


Update = Callable[[Any, Operands, Any, Decision], Tensor]


def of_trained(update: Update) -> Update:
    """Decorate a backend's update of main params: it gets those that have a gradient, at least one.

    Those that are held as remainders are decoded for it, some at a time, and are their own model params then. Without
    a gradient they are not decoded: encoding could give them another remainder.
    """

    @wraps(update)
    def updating(backend: Any, operands: Operands, hyper: Any, decision: Decision) -> Tensor:
        there = [index for index, grad in enumerate(operands.grad) if grad is not None]
        if not there:
            return torch.zeros(len(operands.model), dtype=torch.bool, device=operands.model[0].device)
        trained = operands if len(there) == len(operands.model) else operands.pick(there)

        def flags_of(places: Sequence[int]) -> Any:  # when it returns, its main params' memory is free for the next
            part = trained.pick(places)
            part.main = [torch.empty_like(model, dtype=torch.float32) for model in part.model]
            backend.decode_(part)
            update(backend, replace(part, model=part.main, remainder=[]), hyper, decision)
            return backend.encode_(part, decision.found_inf)

        if operands.remainder:
            flags = torch.cat(list(map(flags_of, runs_of(trained.model, DECODED_NUMEL))))
        else:
            flags = update(backend, trained, hyper, decision)
        return flags_at(there, flags, len(operands.model))

    return updating


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements, in row-major order: a view of a single contiguous tensor."""
    return torch.cat([one.reshape(-1) for one in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)


def _parts(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of joined elements in the shapes of ``likes``."""
    parts = flat.split([like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]


def _sums(flat: Tensor, likes: Sequence[Tensor]) -> Tensor:
    """Return the sum of each part of joined integers, modulo 2**64: int64, shape [len(likes)]."""
    if len(likes) == 1:
        return flat.sum(dtype=torch.int64).reshape(1)
    upto = torch.cat([flat.new_zeros(1, dtype=torch.int64), flat.cumsum(0, dtype=torch.int64)])
    ends = [0, *accumulate(like.numel() for like in likes)]
    return torch.stack([upto[end] for end in ends]).diff()
