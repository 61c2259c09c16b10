"""Scales of moments held as 8-bit codes: their shape and their place beside a main param that is a DTensor.

Groups are cut from the flattened parameter. A rank's part of a DTensor must be a run of whole groups, so it must be cut
along dimension 0 alone. Scales have the parameter's placements. Their shape is [rows, groups per row] if each row is a
whole number of groups (uneven sharding is allowed then); otherwise it is [groups].
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.kernels.compact_moments import GROUP, decode_moments, is_scale, num_groups
from megascale.rules import MOMENT_CODES
from megascale.utils.collectives import full_tensor
from megascale.utils.dtensors import first_row, is_dtensor, placed_like, row_cuts, to_local


def has_whole_groups(tensor: Tensor) -> bool:
    """Whether every rank's part of ``tensor`` is a run of whole groups. True of what is no DTensor."""
    parts = row_cuts(tensor) if is_dtensor(tensor) else 1
    if parts is None or parts == 1 or _row_numel(tensor.shape) % GROUP == 0:
        return parts is not None
    return tensor.shape[0] % parts == 0 and tensor.numel() // parts % GROUP == 0


def first_element(tensor: Tensor) -> int:
    """Return the index, in the flattened tensor, of the first element of this rank's part."""
    if not is_dtensor(tensor) or tensor.dim() == 0 or row_cuts(tensor) == 1:
        return 0
    return first_row(tensor) * _row_numel(tensor.shape)


def scales_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of the scales of this rank's part of ``tensor``."""
    return _shape(tensor, to_local(tensor).shape)


def scales_like(tensor: Tensor, scales: Tensor) -> Tensor:
    """Return the scales of this rank's part as the state beside ``tensor``: of a DTensor a DTensor."""
    part = scales.view(scales_shape(tensor))
    if not is_dtensor(tensor):
        return part
    shape = _shape(tensor, tensor.shape)
    return placed_like(part, tensor, shape, torch.empty(shape, device="meta").stride())


@torch.no_grad()
def place_scales(scales: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return new scales beside ``tensor`` with the values of saved ones, which are whole or any DTensor."""
    whole = full_tensor(scales.detach()).reshape(-1)
    begin = first_element(tensor) // GROUP
    part = whole[begin : begin + scales_shape(tensor).numel()].to(tensor.device, dtype, copy=True)
    return scales_like(tensor, part)


def decoded_where_cut(state: Mapping[str, Any], tensor: Tensor) -> dict[str, Any]:
    """Return the saved state of ``tensor``, its moments decoded, whole, if they are codes and ranks cut their groups.

    A rank's part of such codes would begin in the middle of a group, and has no run of scales. All ranks of the DTensor
    call it together.
    """
    names = [name for name, dtype in MOMENT_CODES.items() if isinstance(state.get(name), Tensor)]
    # One moment alone is refused later: a quotient means nothing without the other.
    both = len(names) == len(MOMENT_CODES)
    if has_whole_groups(tensor) or not both or not any(state[name].dtype == MOMENT_CODES[name] for name in names):
        return dict(state)
    # A checkpoint's scales come on the host.
    whole = {
        key: full_tensor(state[key].detach()).to(to_local(tensor).device) for key in (*names, *filter(is_scale, state))
    }
    return {key: value for key, value in state.items() if not is_scale(key)} | decode_moments(whole)


def _shape(tensor: Tensor, part: torch.Size) -> torch.Size:
    row = _row_numel(tensor.shape)
    if is_dtensor(tensor) and row > 0 and row % GROUP == 0:
        return torch.Size([part[0], row // GROUP])
    return torch.Size([num_groups(part.numel())])


def _row_numel(shape: torch.Size) -> int:
    return math.prod(shape[1:])
