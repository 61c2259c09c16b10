"""Main params and their state that move to host memory, or back, between two steps: with every bit."""

from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale.main_params.base import MainParams
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import to_local
from megascale.utils.nests import map_tensors


@torch.no_grad()
def relocate(main_params: MainParams, state: MutableMapping[Any, Any], fraction: float) -> list[MainParam]:
    """Move what another ``fraction`` in host memory wants elsewhere; return what has moved.

    All memory is allocated, and all copies are made, before anything changes. Communicates nothing. Weights must have
    arrived, and those that others wrote must have been taken over.

    Args:
        main_params: of an optimizer that keeps some of them in host memory.
        state: of the same optimizer.
        fraction: the share of the elements that is to be in host memory, at least: above 0, up to 1.

    Raises UsageError for too little host memory, and torch's error for too little memory of the device.
    """
    moving = main_params.moved_to(fraction)
    entries = [_moved_state(state, param, to_local(there.memory).device) for param, there in moving]
    for param, there in moving:
        to_local(there.memory).copy_(to_local(param.memory))
    for (param, there), entry in zip(moving, entries, strict=True):
        param.take_place_of(there)
        if entry is not None:
            state[param.model].update(entry)
    main_params.offload_fraction = fraction
    main_params.forget_units()
    return [param for param, _ in moving]


def _moved_state(state: MutableMapping[Any, Any], param: MainParam, device: torch.device) -> dict[str, Any] | None:
    """Return a parameter's state on ``device``; None if it has none."""
    entry = state.get(param.model)
    if not isinstance(entry, dict) or not entry:
        return None
    moved: dict[str, Any] = map_tensors(partial(Tensor.to, device=device), entry)
    return moved


def among(params: Sequence[MainParam], moved: Sequence[MainParam]) -> list[MainParam]:
    """Return those of ``params`` that are among ``moved``."""
    ids = set(map(id, moved))
    return [param for param in params if id(param) in ids]
