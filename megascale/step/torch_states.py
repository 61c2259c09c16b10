"""Converts state of torch's optimizers that an older torch made, or that was made for 16-bit parameters.

It serves optimizers that run their own ``step()``: our kernels create and convert their state themselves.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.main_params.main_param import MainParam
from megascale.utils.dtypes import HALF_DTYPES

PER_PARAMETER = frozenset({"eta", "mu", "mu_product", "step"})
"""State that torch's elementwise optimizers keep once for a parameter, as 0-d tensors; all other has its shape."""


def is_per_element(key: str, value: Tensor, param: Tensor) -> bool:
    """Return whether a whole state tensor has one element per element of ``param``. For 0-d ones ``key`` decides."""
    return value.shape == param.shape and (value.dim() > 0 or key not in PER_PARAMETER)


def widen(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], param: MainParam, *, is_torchs: bool) -> None:
    """Convert, in its dict, the state that an optimizer made of a 16-bit model param to its main param's dtype.

    Of torch's optimizers all 16-bit tensors, and Python numbers, which older torch kept for ``step`` and the like, to
    0-d fp32 tensors; so an integer ``step``, which torch's fused loops cannot add to. Of others only tensors of the
    parameter's dtype and shape: what else is 16-bit is so on purpose. Values that were rounded stay rounded, except
    Adagrad's initial accumulator before the first step: it is set anew.
    """
    state, rounded = optimizer.state.get(param.model, {}), set[str]()
    for key, value in list(state.items()):
        if not is_torchs:
            is_rounded = isinstance(value, Tensor) and (value.dtype, value.shape) == (
                param.form.dtype,
                param.main.shape,
            )
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            state[key], is_rounded = torch.tensor(float(value), dtype=torch.float32, device="cpu"), False
        elif isinstance(value, Tensor) and key == "step" and value.numel() == 1 and not value.is_complex():
            state[key], is_rounded = value.reshape(()).to(torch.promote_types(value.dtype, torch.float32)), False
        else:
            is_rounded = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
        if is_rounded:
            state[key] = value.to(param.main.dtype)
            rounded.add(key)
    if isinstance(optimizer, torch.optim.Adagrad) and "sum" in rounded and float(state["step"]) == 0:
        state["sum"] = torch.full_like(state["sum"], options["initial_accumulator_value"])
