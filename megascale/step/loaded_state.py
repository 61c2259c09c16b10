"""The wrapped optimizer's own ``load_state_dict()``, which casts state to the dtype of the parameter.

Its state is that of main params. In fp16 second moments would become 0, and the next step would move a weight by many
times the learning rate; 8-bit codes would become numbers.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.nests import map_tensors


def keep_loaded_state(wrapper: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Let ``inner.load_state_dict()`` take state as it is given, for as long as ``wrapper`` lives.

    One that never ran torch's constructor has no hooks, and its own way to load.
    """
    if hasattr(inner, "_optimizer_load_state_dict_pre_hooks"):
        finalize(wrapper, inner.register_load_state_dict_pre_hook(_under_params).remove)


def _under_params(inner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with copies of its state, under the parameters themselves in place of their numbers.

    What is under no number of a parameter is not cast by torch, and is the state of a parameter all the same.
    """
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = list(chain.from_iterable(group["params"] for group in inner.param_groups))
    if len(saved) != len(params):
        return state_dict  # torch says in which group
    of_number = dict(zip(saved, params, strict=True))
    state = dict(state_dict["state"])
    for number in list(state):
        if number in of_number and isinstance(state[number], Mapping):
            param = of_number[number]
            state[param] = {key: _copied(key, value, param.device) for key, value in state.pop(number).items()}
    return {**state_dict, "state": state}


def _copied(key: Any, value: Any, device: torch.device) -> Any:
    """Return a state on the parameter's device, 16-bit numbers in fp32, as the main param is; a count where it is."""

    def copied(tensor: Tensor) -> Tensor:
        dtype = torch.float32 if tensor.dtype in HALF_DTYPES else tensor.dtype
        return tensor.clone() if key == "step" else tensor.to(device, dtype, copy=True)

    return map_tensors(copied, value)
