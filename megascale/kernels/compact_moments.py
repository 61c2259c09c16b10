"""8-bit moments: Adam's ``exp_avg`` as int8, ``exp_avg_sq`` as uint8, and an fp32 scale for each group of 32 elements.

**Layout.** Groups are cut from the flattened parameter, so that they are the same on any number of ranks. All functions
take and return 1-D tensors that begin with a whole group; the last group may be shorter. Every operation is an IEEE
operation on fp32 or exact on integers, so that all backends produce the same bits.

**Why a logarithmic code for the second moment.** An update divides by the root of ``exp_avg_sq``. A linear 8-bit code
gives the largest element of a group fine steps and rounds a small one to 0, and the division then explodes. So the
*root* is stored, and its code is logarithmic, which costs no logarithm: the bit pattern of a positive fp32 number, cut
to its upper bits, already is one. Code ``q`` of a group stands for the number with the bits ``floor + (q << shift)``.
The shift, 16 to 19, is the smallest with which 255 codes reach from the group's largest root to its smallest: over 2 to
16 octaves, with 128 to 16 codes in each. Roots below that range are raised to ``floor``: no root becomes 0 beside one
that is not, and an update never divides by less than it would in fp32. All codes of a coarser shift are codes of a
finer one, too. The scale is the fp32 number ``floor`` with ``shift - 16`` in its two lowest bits, which ``floor`` does
not need; a group of zeros has scale 0. A group of zero codes stands for zeros, whatever its scale.

**Why the first moment is a quotient.** ``exp_avg`` is stored divided by the root of ``exp_avg_sq`` as stored. That
quotient is bounded and of similar size for all elements of a group, so that a linear code is enough: ``q * scale`` with
``q`` from -127 to 127.

**Why dither.** With ``beta2`` near 1 a root changes by less than one code per step. Rounding to nearest would return
the old code every time, and the moment would stand still for ever. So a number between 0 and 1 code is added before the
lower bits are cut off: the code rises in as many steps as the mean requires. This *dither* depends on the element's
index and the step count alone, so that any rank, backend or resumed run adds the same. Its values in successive steps
are spread evenly (16 at a time belong to a Weyl sequence), which tracks the mean faster than random numbers. The
quotients of ``exp_avg`` get the same treatment: a number between -1/2 and 1/2 code, from lower bits of the dither, is
added before rounding to nearest. It stays so far below 1/2 that the largest quotient of a group remains code 127.

**An example.** Roots 1, 0.5, 0.01 and 0.0003 span 12 octaves: shift 19, 16 codes per octave, floor 1.72e-5. In step 1
they become codes 254, 238, 147 and 66, which stand for 1, 0.5, 0.01025 and 0.000305; in step 2 the third, with another
dither, becomes 146, which stands for 0.00977: 0.01 lies between the two.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from megascale.rules import CODE_DTYPES, FIRST_DTYPE, MOMENT_CODES, SECOND_DTYPE

GROUP = 32
"""Elements that share a scale."""
SCALE_SUFFIX = "_scale"
"""Added to the name of a moment: the name of its scales."""
_SCALES = frozenset(f"{name}{SCALE_SUFFIX}" for name in MOMENT_CODES)
LEAST_QUOTIENT = 2.0**-100
"""A group whose quotients are all smaller has scale 0: the reciprocal of its scale could overflow."""
FINEST, COARSEST = 16, 19
TOP_CODE = 255
NAN_BITS = 0x7FC00000
"""Processors differ in the bits of a NaN that they compute."""
INDEX_STRIDE, STEP_STRIDE = 0x9E3779B1, 0x85EBCA77  # odd; the first is 2**32 divided by the golden ratio
TO_MANTISSA, MANTISSA_BITS = 7, 0x7FFC00
ABOVE_ONE = 0x3F800200
"""The bits of 1 + 2**-14 in fp32."""
_WORD = 0xFFFFFFFF


def num_groups(numel: int) -> int:
    """Return how many scales ``numel`` elements have."""
    return -(-numel // GROUP)


def is_scale(name: str) -> bool:
    """Whether a state of this name holds the scales of a moment."""
    return name in _SCALES


def held_bytes(dtype: torch.dtype) -> float:
    """Return the bytes of an element of a moment in ``dtype``, scales included."""
    return dtype.itemsize + (4 / GROUP if dtype in CODE_DTYPES else 0)


def dither(start: int, numel: int, step: Tensor) -> Tensor:
    """Return numbers below 2**32 as int64, shape [numel].

    They rise evenly with the index, and with the step within 16 steps. Where the next 16 begin is as good as random:
    the dither has no period that gradients could share, which would leave moments off for long.

    Args:
        start: of the first element in the flattened parameter, whose indices count from 0.
        numel: elements.
        step: 0-d: landed steps of the parameter, with the one being taken.
    """
    index = torch.arange(start, start + numel, dtype=torch.int64, device=step.device)
    count = step.to(torch.int64)
    mixed = ((count >> 4) * INDEX_STRIDE) & _WORD
    mixed = ((mixed ^ (mixed >> 15)) * STEP_STRIDE) & _WORD
    return (index * INDEX_STRIDE + count * STEP_STRIDE + (mixed ^ (mixed >> 13))) & _WORD


def encode_root(root: Tensor, dithers: Tensor) -> tuple[Tensor, Tensor]:
    """Return uint8 codes, shape [n], and fp32 scales, shape [groups], of roots of second moments.

    Args:
        root: fp32, shape [n], 0 or above. Inf is held exactly, and NaN as the one with the bits 0x7FC00000.
        dithers: int64, shape [n], 0 to 2**32 - 1.
    """
    bits = torch.where(root.isnan(), NAN_BITS, root.view(torch.int32).to(torch.int64) & 0x7FFFFFFF)
    highest, lowest = grouped(bits).amax(1, keepdim=True), grouped(bits, 0x7FFFFFFF).amin(1, keepdim=True)
    shift = torch.full_like(highest, FINEST)
    for finer in range(FINEST, COARSEST):
        shift += (highest >> finer) - (lowest >> finer) > TOP_CODE - 1
    floor = ((highest >> shift) + 1 - TOP_CODE).clamp_(min=0)
    dithered = grouped(bits) + (grouped(dithers) >> (32 - shift))
    codes = ((dithered >> shift) - floor).clamp_(0, TOP_CODE)
    scale = (floor << shift) + (shift - FINEST)
    return flat_of(codes, root).to(SECOND_DTYPE), scale.view(-1).to(torch.int32).view(torch.float32)


def decode_root(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the roots, fp32, shape [n], of what :func:`encode_root` returned; 0 for codes that were set to 0.

    A group whose ``floor`` is not 0 has a code of at least 254. So a group of zeros is none of those that were encoded.
    """
    bits = scale.reshape(-1).view(torch.int32).to(torch.int64).unsqueeze(1)
    codes_of_group = grouped(codes.to(torch.int64))
    floor = torch.where(codes_of_group.any(1, keepdim=True), bits & ~3, 0)
    decoded = floor + (codes_of_group << (FINEST + (bits & 3)))
    return flat_of(decoded, codes).to(torch.int32).view(torch.float32)


def encode_quotient(exp_avg: Tensor, root: Tensor, dithers: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes, shape [n], and fp32 scales, shape [groups], of first moments.

    Args:
        exp_avg: fp32, shape [n]. One that is not finite makes its group NaN.
        root: fp32, shape [n]: roots of the second moments as held. Where it is 0, the first moment is held as 0.
        dithers: int64, shape [n], 0 to 2**32 - 1.
    """
    quotient = torch.where(root == 0, 0.0, exp_avg / root)
    magnitude = quotient.view(torch.int32) & 0x7FFFFFFF
    largest = grouped(magnitude).amax(1, keepdim=True).view(torch.float32)
    scale = torch.where(largest < LEAST_QUOTIENT, 0.0, largest / 127)
    # The dither of codes rounded to nearest: bits 3 to 15 as (k + 1/2) / 2**13 - 1/2. Kernels put these bits at
    # the top of the mantissa of a number between 1 and 2, and take 1.5 away.
    mantissa = (dithers << TO_MANTISSA) & MANTISSA_BITS
    around_zero = (mantissa | ABOVE_ONE).to(torch.int32).view(torch.float32) - 1.5
    # A scale of 0 makes inf or NaN here, and one that is not finite NaN: all become code 0.
    dithered = grouped(quotient) * (1 / scale) + grouped(around_zero)
    codes = dithered.round_().nan_to_num_(0.0, 0.0, 0.0)
    return flat_of(codes, exp_avg).to(FIRST_DTYPE), scale.view(-1)


def decode_quotient(codes: Tensor, scale: Tensor, root: Tensor) -> Tensor:
    """Return the first moments, fp32, shape [n]. ``root``: as :func:`encode_quotient` took it."""
    return flat_of(grouped(codes.to(torch.float32)) * scale.reshape(-1, 1), codes) * root


def decode_moments(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``exp_avg`` and ``exp_avg_sq`` as fp32 in the parameter's shape. ``state``: may hold either as codes."""
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if second.dtype == SECOND_DTYPE:
        root = decode_root(second.reshape(-1), state[f"exp_avg_sq{SCALE_SUFFIX}"])
        second = root.square().view(second.shape)
    else:
        second = second.to(torch.float32)
        root = exact_root(second.reshape(-1))
    if first.dtype == FIRST_DTYPE:
        quotients = decode_quotient(first.reshape(-1), state[f"exp_avg{SCALE_SUFFIX}"], root)
        return {"exp_avg": quotients.view(first.shape), "exp_avg_sq": second}
    return {"exp_avg": first.to(torch.float32), "exp_avg_sq": second}


def encode_moments(
    exp_avg: Tensor, exp_avg_sq: Tensor, dtypes: Mapping[str, torch.dtype], start: int, step: Tensor
) -> dict[str, Tensor]:
    """Return the state that holds fp32 moments in ``dtypes``: both in their shape, and scales of those held as codes.

    Args:
        exp_avg, exp_avg_sq: fp32, alike in shape.
        dtypes: of ``exp_avg`` and ``exp_avg_sq``.
        start, step: see :func:`dither`.
    """
    made: dict[str, Tensor] = {}
    root = exact_root(exp_avg_sq.reshape(-1))
    dithers = dither(start, root.numel(), step)
    if dtypes["exp_avg_sq"] == SECOND_DTYPE:
        codes, scale = encode_root(root, dithers)
        root = decode_root(codes, scale)
        made |= {"exp_avg_sq": codes.view(exp_avg_sq.shape), f"exp_avg_sq{SCALE_SUFFIX}": scale}
    else:
        made["exp_avg_sq"] = exp_avg_sq
    if dtypes["exp_avg"] == FIRST_DTYPE:
        codes, scale = encode_quotient(exp_avg.reshape(-1), root, dithers)
        made |= {"exp_avg": codes.view(exp_avg.shape), f"exp_avg{SCALE_SUFFIX}": scale}
    else:
        made["exp_avg"] = exp_avg
    return made


def exact_root(value: Tensor) -> Tensor:
    """Return the correctly rounded square root. torch's own fp32 root is an ulp off on some processors."""
    return value.to(torch.float64).sqrt().to(value.dtype)


def grouped(values: Tensor, fill: float = 0) -> Tensor:
    """Return values of shape [n] as [groups, GROUP], the last group filled up."""
    return pad(values, (0, num_groups(values.numel()) * GROUP - values.numel()), value=fill).view(-1, GROUP)


def flat_of(grouped: Tensor, like: Tensor) -> Tensor:
    """Return the elements of groups without those that filled up the last one, in the shape [n] of ``like``."""
    return grouped.reshape(-1)[: math.prod(like.shape)]
