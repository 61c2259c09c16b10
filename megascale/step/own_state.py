"""What torch's optimizers read in their own ``step()``: checked before the ranks agree, as it would fail half-way."""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.main_params.main_param import MainParam
from megascale.step.kernel_state import require_options
from megascale.step.torch_states import PER_PARAMETER

_ADAM = ("step", "exp_avg", "exp_avg_sq")
STATES: dict[type, tuple[str, ...]] = {
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.ASGD: ("step", "eta", "mu", "ax"),
    torch.optim.NAdam: (*_ADAM, "mu_product"),
    torch.optim.RAdam: _ADAM,
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Rprop: ("step", "prev", "step_size"),
}
"""By exact type, as a subclass may have changed ``step()``: the state that is read once there is any."""

_Switch = Callable[[Mapping[str, Any]], bool]
SWITCHED: dict[type, dict[str, _Switch]] = {
    torch.optim.RMSprop: {
        "momentum_buffer": lambda options: options["momentum"] > 0,
        "grad_avg": lambda options: bool(options["centered"]),
    },
    torch.optim.Adam: {"max_exp_avg_sq": lambda options: bool(options["amsgrad"])},
    torch.optim.AdamW: {"max_exp_avg_sq": lambda options: bool(options["amsgrad"])},
}
"""State that torch creates, as zeros, at a parameter's first step only where an option asks for it."""


def check_options(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
    """Raise ArgumentError, naming it, for an option of a param group that the optimizer's ``step()`` cannot use.

    Options of which the default is a number, or a tuple of numbers, are such, or tensors of one. Optimizers that are
    not torch's are not checked.
    """
    if type(optimizer) not in STATES:
        return
    require_options(options, list(optimizer.defaults))
    for name, default in optimizer.defaults.items():
        value = options[name]
        if isinstance(default, tuple):
            fits = isinstance(value, (tuple, list)) and len(value) == len(default) and all(map(_is_number, value))
            wanted = f"{len(default)} numbers"
        else:
            fits, wanted = not _is_number(default) or _is_number(value), "a number"
        if not fits:
            raise ArgumentError(
                f"{name} of a param group must be {wanted} for {type(optimizer).__name__}, got {value!r} of type "
                f"{type(value).__name__}; set it as param_groups had it before"
            )


def complete_state(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], param: MainParam, state: dict[str, Any]
) -> None:
    """Check the state of a parameter that has taken a step, and create buffers that an option now asks for, of zeros.

    Raises UsageError, naming it, for state that is missing or that is no tensor of the main param's shape. Optimizers
    that are not torch's are not checked.
    """
    kind = type(optimizer)
    if kind not in STATES or not state:
        return
    switched = [name for name, is_on in SWITCHED.get(kind, {}).items() if is_on(options)]
    lacks = [name for name in STATES[kind] if state.get(name) is None]
    if lacks:
        raise UsageError(
            f"the optimizer's state of {param.name!r} has {sorted(map(str, state))} and lacks {lacks}; load state that "
            "is whole, or clear it, so that the parameter starts anew"
        )
    for name in (*STATES[kind], *switched):
        if state.get(name) is None:
            state[name] = torch.zeros_like(param.main, requires_grad=False, memory_format=torch.preserve_format)
        elif name not in PER_PARAMETER and not _is_like(state[name], param.main):
            shape = tuple(state[name].shape) if isinstance(state[name], Tensor) else None
            story = f"a {type(state[name]).__name__}" if shape is None else f"of shape {shape}"
            raise UsageError(
                f"the optimizer's state[{param.name!r}][{name!r}] is {story}, but its main param has shape "
                f"{tuple(param.main.shape)}; load state of the same parameters, in the same order"
            )


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.dtype.is_complex and not value.is_meta
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_like(value: Any, main: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == main.shape
