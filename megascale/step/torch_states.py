"""Converts state of torch's optimizers that an older torch made, or that was made for 16-bit parameters.

It serves optimizers that run their own ``step()``: our kernels create and convert their state themselves.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.errors import StateDictError, UsageError
from megascale.main_params.main_param import MainParam
from megascale.utils.dtypes import HALF_DTYPES

PER_PARAMETER = frozenset({"eta", "mu", "mu_product", "step"})
"""State that torch's elementwise optimizers keep once for a parameter, as 0-d tensors; all other has its shape."""


def state_of(optimizer: torch.optim.Optimizer, param: MainParam) -> dict[str, Any]:
    """Return what an optimizer keeps for a parameter. Raises UsageError, naming it, where that is no dict."""
    state = optimizer.state.get(param.model, {})
    if not isinstance(state, dict):
        raise UsageError(
            f"the optimizer's state of {param.name!r} is a {type(state).__name__}, not a dict; load the state anew, or "
            "delete it, so that the parameter starts anew"
        )
    return state


def is_per_element(key: str, value: Tensor, param: Tensor) -> bool:
    """Return whether a whole state tensor has one element per element of ``param``. For 0-d ones ``key`` decides."""
    return value.shape == param.shape and (value.dim() > 0 or key not in PER_PARAMETER)


def with_tensor_counts(
    optimizer: torch.optim.Optimizer, name: str, state: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the loaded state of parameter ``name`` as torch's own optimizers read it; others' is not converted.

    Python numbers, which older torch kept for ``step`` and the like, become 0-d fp32 tensors; so does an integer
    ``step``, which torch's fused loops cannot add to. State that was made for 16-bit parameters becomes fp32 where the
    parameter's ``dtype`` is, as in torch's own ``load_state_dict()``; of 16-bit ones :func:`widen` converts it.

    Raises StateDictError for a ``step`` that is not one number.
    """
    if not _is_torchs(optimizer):
        return dict(state)
    made = {
        key: torch.tensor(float(value), dtype=torch.float32, device="cpu")
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else value
        for key, value in state.items()
    }
    made |= {
        key: value.to(dtype)
        for key, value in made.items()
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES and dtype not in HALF_DTYPES
    }
    if "step" in made:
        step = made["step"]
        if not isinstance(step, Tensor) or step.numel() != 1 or step.is_complex():
            raise StateDictError(f"optimizer state of {name!r} has a step that is not one number: {step!r}")
        made["step"] = step.reshape(()) if step.is_floating_point() else step.reshape(()).float()
    return made


def widen(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], param: MainParam) -> None:
    """Convert the state that an optimizer made of a 16-bit model param to its main param's dtype, in its dict.

    Of an optimizer that is not torch's only tensors of the parameter's dtype and shape: others are 16-bit on purpose.
    Values that were rounded stay rounded, except Adagrad's initial accumulator before the first step: it is set anew.
    """
    state, is_torchs = optimizer.state.get(param.model, {}), _is_torchs(optimizer)
    rounded = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor)
        and (
            value.dtype in HALF_DTYPES
            if is_torchs
            else value.dtype == param.form.dtype and value.shape == param.main.shape
        )
    }
    state.update({key: value.to(param.main.dtype) for key, value in rounded.items()})
    if isinstance(optimizer, torch.optim.Adagrad) and "sum" in rounded and float(state["step"]) == 0:
        state["sum"] = torch.full_like(state["sum"], options["initial_accumulator_value"])


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of torch.optim, or a subclass of one."""
    kinds = type(optimizer).__mro__
    return any(kind.__module__.startswith("torch.optim") and kind is not torch.optim.Optimizer for kind in kinds)
