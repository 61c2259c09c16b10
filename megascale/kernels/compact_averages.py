"""8-bit averages: the momentum of SGD and Lion, which has no second moment beside it, as int8.

Groups of 32, dither and ends are those of :mod:`megascale.kernels.compact_moments`. The scale is the group's largest
magnitude, fp32. Code ``q``, from -127 to 127, stands for ``scale * (q / 127)**4`` with the sign of ``q``: elements that
share a scale may differ in size by many octaves. A magnitude between two codes becomes the upper one if its distance
from the lower one, as a part of theirs, exceeds the dither (its upper 16 bits): codes follow with the right mean, and
the largest magnitude is held exactly. Every operation is an IEEE one on fp32 or exact on integers: backends have the
same bits.
"""

import torch
from torch import Tensor

from megascale.kernels.compact_moments import exact_root, flat_of, grouped
from megascale.rules import FIRST_DTYPE

LEAST_AVERAGE = 2.0**-100
"""A group whose magnitudes are all smaller has scale 0: the reciprocal of its scale could overflow."""
TOP_CODE = 127
UNIT = 1 / 260144640.0
"""The reciprocal of 127**4, as fp32: the level of code 127 is exactly 1."""


def encode_average(average: Tensor, dithers: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes, shape [n], and fp32 scales, shape [groups].

    Args:
        average: fp32, shape [n]. One that is not finite makes its group NaN.
        dithers: int64, shape [n], 0 to 2**32 - 1; see :func:`megascale.kernels.compact_moments.dither`.
    """
    magnitude = grouped(average.view(torch.int32) & 0x7FFFFFFF)
    largest = magnitude.amax(1, keepdim=True).view(torch.float32)
    scale = torch.where(largest < LEAST_AVERAGE, 0.0, largest)
    # A scale of 0 makes inf or NaN here, and one that is not finite NaN: all become code 0.
    ratio = (magnitude.view(torch.float32) * (1 / scale)).nan_to_num_(0.0, 0.0, 0.0)
    lower = (exact_root(exact_root(ratio)) * TOP_CODE).floor_().clamp_(max=TOP_CODE - 1)
    below = _level(lower)
    distance = _level(lower + 1) - below
    threshold = (grouped(dithers) >> 16).to(torch.float32) * 2.0**-16 * distance
    codes = lower + (ratio - below > threshold)
    return flat_of(torch.where(grouped(average) < 0, -codes, codes), average).to(FIRST_DTYPE), scale.view(-1)


def decode_average(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the average, fp32, shape [n], of what :func:`encode_average` returned."""
    code = grouped(codes.to(torch.float32))
    level = _level(code)
    return flat_of(torch.where(code < 0, -level, level) * scale.reshape(-1, 1), codes)


def _level(code: Tensor) -> Tensor:
    """Return the magnitude of a code, as a part of the scale."""
    square = code * code
    return square * square * UNIT
