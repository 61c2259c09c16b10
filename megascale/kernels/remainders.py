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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from megascale.kernels.protocol import FP16_OVERFLOW, HeldParams, Operands

REMAINDER_DTYPE = torch.int16
MOST = 32767
_MAGNITUDE, _SIGN, _HALF_MAGNITUDE = 0x7FFFFFFF, -0x80000000, 0x7FFF
FP16_INF = 0x7C00
FP16_LINEAR = 0x0100
"""The bits of 2**-16 in fp16: below, remainders are of fixed point."""
UNIT = 2.0**40
_WORD, KEY_STRIDE, KEY_START = 0xFFFFFFFF, 0x9E3779B1, 0x85EBCA77
_TOGETHER = 1 << 20
"""Elements that are joined, or summed at a time, in int64, an even number: a larger parameter is encoded alone."""


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
    """Return the fp32 main param that a model param in fp16 or bf16 and its int16 remainder stand for."""
    offset = remainder.to(torch.int32)
    half = model.view(torch.int16).to(torch.int32)
    if model.dtype == torch.bfloat16:
        return ((half << 16) + offset).view(torch.float32)
    magnitude = model.abs().to(torch.float32)
    exact = magnitude.view(torch.int32) + offset
    fixed = (magnitude + offset.to(torch.float32) * (1 / UNIT)).view(torch.int32)
    bits = torch.where(half & _HALF_MAGNITUDE < FP16_LINEAR, fixed, exact)
    return torch.where(half < 0, bits | _SIGN, bits).view(torch.float32)


def fingerprint(model: Tensor) -> Tensor:
    """Return a number that tells whether others have written a 16-bit model param: int64, 0-d, below 2**32.

    The sum of the hashes of *words*, modulo 2**32. A word is the bits of two neighbours, of which the first has an even
    index. Its hash depends on its place too, is another number for any other word there, and 0 for two zeros. So
    another value of one element always makes another number, and what changes many elements, a factor or a sign as
    well, makes the same one with the probability of a random number.
    """
    total = torch.zeros((), dtype=torch.int64, device=model.device)
    flat = model.detach().reshape(-1)
    for start in range(0, len(flat), _TOGETHER):
        words = _words(flat[start : start + _TOGETHER])
        total += _hashes(words, _factors(start // 2, len(words), model.device)).sum()
    return total & _WORD


def _words(flat: Tensor) -> Tensor:
    """Return pairs of neighbours as int64 below 2**32: the bits of the first and, times 2**16, of the second."""
    bits = flat.view(torch.int16).to(torch.int64) & 0xFFFF
    return bits[::2] + pad(bits[1::2] << 16, (0, len(bits) % 2))


def _factors(start: int, num_words: int, device: torch.device) -> Tensor:
    """Return odd numbers below 2**32 for words from index ``start`` on.

    They do not rise evenly: sums of such hashes of tensors of one value, of 2**23 elements and more, could be the same.
    """
    index = torch.arange(start, start + num_words, dtype=torch.int64, device=device)
    key = (index * (2 * KEY_STRIDE) + KEY_START) & _WORD
    return (key ^ (key >> 15)) | 1


def _hashes(words: Tensor, factors: Tensor) -> Tensor:
    """Return a number below 2**32 for each word: with one factor, another for each word."""
    mixed = ((words ^ (words >> 13)) * factors) & _WORD  # products of int64 wrap
    return mixed ^ (mixed >> 15)


class TorchRemainders:
    """Main params held as remainders, in plain tensor code. Base of all backends.

    Small parameters are decoded and encoded together, so that the number of kernels does not grow with them.
    """

    fuses_remainders = False

    def decode_(self, held: HeldParams) -> None:
        """See :class:`megascale.kernels.Backend`."""
        for indices in _joinable(held.models):
            models, remainders, mains = ([column[i] for i in indices] for column in (*held.beside[:2], held.mains))
            torch._foreach_copy_(mains, _parts(decode(_joined(models), _joined(remainders)), mains))

    def encode_(self, held: HeldParams, found_inf: Tensor) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        skipped = (found_inf != 0).reshape(())
        flags = [torch.zeros_like(skipped)] * len(held.models)
        for indices in _joinable(held.models):
            models, remainders, marks = ([column[i] for i in indices] for column in held.beside)
            main, model, remainder = map(_joined, ([held.mains[i] for i in indices], models, remainders))
            rounded, left = encode(main, model.dtype)
            keeps = skipped
            if model.dtype == torch.float16:
                is_large = ~(main.abs() < FP16_OVERFLOW)
                keeps = skipped | (is_large & main.isfinite())
                overflowed = (_sums(is_large, models) > 0) & ~skipped
                for index, flag in zip(indices, overflowed.unbind(), strict=True):
                    flags[index] = flag
            written = torch.where(keeps, model, rounded)
            torch._foreach_copy_(models, _parts(written, models))
            torch._foreach_copy_(remainders, _parts(torch.where(keeps, remainder, left), remainders))
            torch._foreach_copy_(marks, list(_fingerprints(written, models).unbind()))
        return torch.stack(flags)

    def on_decoded(self, operands: Operands, update: Callable[[Operands], Tensor], found_inf: Tensor) -> Tensor:
        """Run ``update`` on main params that are decoded for this call alone. Returns the overflow flags."""
        mains = [torch.empty_like(model, dtype=torch.float32) for model in operands.model]
        held = HeldParams(operands.model, operands.remainder, operands.fingerprint, mains)
        self.decode_(held)
        update(replace(operands, main=mains, model=mains, remainder=[], fingerprint=[]))
        return self.encode_(held, found_inf)


def _joinable(models: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of neighbours of one dtype that are small enough to be joined."""
    indices: list[int] = []
    numel = 0
    for index, model in enumerate(models):
        numel += model.numel()
        if indices and (numel > _TOGETHER or model.dtype != models[indices[0]].dtype):
            yield indices
            indices, numel = [], model.numel()
        indices.append(index)
    if indices:
        yield indices


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


def _fingerprints(flat: Tensor, models: Sequence[Tensor]) -> Tensor:
    """Return the fingerprint of each part of joined model params."""
    if len(models) == 1:
        return fingerprint(flat).reshape(1)
    zero = flat.new_zeros(1)
    parts = flat.split([model.numel() for model in models])
    even = torch.cat([each for part in parts for each in (part, zero[: len(part) % 2])])
    factors = _factors(0, max(-(-len(part) // 2) for part in parts), flat.device)
    each = [factors[: -(-len(part) // 2)] for part in parts]
    return _sums(_hashes(_words(even), torch.cat(each)), each) & _WORD
