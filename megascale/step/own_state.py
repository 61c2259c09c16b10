"""What torch's optimizers read in their own ``step()``: checked before the ranks agree, as it would fail half-way."""

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.kernels import shares_elements
from megascale.main_params.main_param import MainParam
from megascale.rules import OWN_STEPS
from megascale.rules.options import has_tensors, require_options
from megascale.step.torch_states import PER_PARAMETER
from megascale.utils.dtensors import is_dtensor, to_local
from megascale.utils.dtypes import HALF_DTYPES

_LERPED = frozenset({"exp_avg", "grad_avg", "row_var", "col_var", "variance"})
"""Moments that torch updates by ``lerp_()``, which wants the main param's dtype. Others may be wider or narrower."""
_FLOATS = (*HALF_DTYPES, torch.float32, torch.float64)
_GROUPED_FLOATS = (torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of counts that torch's foreach and fused loops take."""
_NOT_CAPTURABLE = ("cpu", "mps")
"""Kinds of devices on which torch refuses ``capturable=True``."""


def check_options(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
    """Raise ArgumentError, naming it, for an option of a param group that the optimizer's ``step()`` cannot use.

    Options of which the default is a number, or a tuple of numbers, are such, or 0-d tensors. Where a default is None,
    as in Adafactor's ``eps``, None is right too. Optimizers that are not torch's are not checked.
    """
    kind = type(optimizer)
    if kind not in OWN_STEPS:
        return
    require_options(options, list(optimizer.defaults))
    for name, default in optimizer.defaults.items():
        value = options[name]
        wanted = _wanted(value, default, takes_any=name in OWN_STEPS[kind].read_once)
        if wanted is not None:
            raise ArgumentError(
                f"{name} of a param group must be {wanted} for {kind.__name__}, got {value!r} of type "
                f"{type(value).__name__}; set it as param_groups had it before"
            )
    loops = [name for name in ("foreach", "fused") if options.get(name)]
    if loops and options.get("differentiable"):
        raise ArgumentError(
            f"{loops[0]} and differentiable of a param group are both set, which torch's {kind.__name__} refuses; set "
            f"{loops[0]}=None"
        )


def check_state(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], param: MainParam, state: Mapping[str, Any]
) -> None:
    """Check that the optimizer's ``step()`` can use a parameter's state, and run where the parameter is.

    Optimizers that are not torch's are not checked.

    Raises:
        ArgumentError: for ``capturable=True`` where torch refuses it, and for tensors that its foreach loop refuses.
        UsageError: naming it, for state that is missing, or of another shape or dtype, on another device, or that
            cannot be written.
    """
    kind = type(optimizer)
    if kind not in OWN_STEPS:
        return
    # Before the state, which a first step does not have yet: torch refuses these options then, too.
    is_captured = "capturable" in optimizer.defaults and bool(options["capturable"])
    if is_captured:
        _require_capturable(kind, param)
    elif _is_grouped(kind, options, param.main):
        _require_numbers(kind, options)
    if not state:
        return  # torch makes all of it
    names = _names(kind, param.main)
    lacks = [name for name in names if state.get(name) is None]
    if lacks:
        raise UsageError(
            f"the optimizer's state of {param.name!r} has {sorted(map(str, state))} and lacks {lacks}; load state that "
            "is whole, or clear it, so that the parameter starts anew"
        )
    held = [name for name in (*names, *_switched(kind, options)) if state.get(name) is not None]
    for name in held:
        if name in PER_PARAMETER:
            fault = _count_fault(kind, options, name, state[name], param, is_captured=is_captured)
        else:
            fault = _moment_fault(kind, options, name, state[name], param)
        if fault is not None:
            raise UsageError(f"the optimizer's state[{param.name!r}][{name!r}] {fault}")


def complete_state(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], param: MainParam, state: dict[str, Any]
) -> None:
    """Create buffers, of zeros, that an option now asks for, of a parameter that has taken a step.

    Call :func:`check_state` first, for all parameters. Optimizers that are not torch's are left alone.
    """
    if not state:
        return
    for name in _switched(type(optimizer), options):
        if state.get(name) is None:
            state[name] = torch.zeros_like(param.main)


def _names(kind: type, main: Tensor) -> tuple[str, ...]:
    """Return the names of the state that is read once there is any."""
    step = OWN_STEPS[kind]
    return (*step.state, *(step.of_matrices if main.dim() > 1 else step.of_others))


def _switched(kind: type, options: Mapping[str, Any]) -> list[str]:
    step = OWN_STEPS.get(kind)
    return [] if step is None else [name for name, is_on in step.switched.items() if is_on(options)]


def _shape(name: str, main: Tensor) -> tuple[int, ...]:
    """Return the shape of a moment: its main param's, of Adafactor's factors with 1 in the last or next-to-last."""
    shape = list(main.shape)
    if name in ("row_var", "col_var"):
        shape[-1 if name == "row_var" else -2] = 1
    return tuple(shape)


def _require_capturable(kind: type, param: MainParam) -> None:
    device = param.main.device
    if device.type in _NOT_CAPTURABLE:
        raise ArgumentError(
            f"capturable of a param group is True, but its parameter {param.name!r} is on {device}, where torch's "
            f"{kind.__name__} cannot be captured; set capturable=False"
        )


def _require_numbers(kind: type, options: Mapping[str, Any]) -> None:
    for name in OWN_STEPS[kind].no_tensors:
        if has_tensors(options, [name]):
            raise ArgumentError(
                f"{name} of a param group is {options[name]!r}, and the foreach loop of torch's {kind.__name__} takes "
                "no tensors there; give it numbers, or set foreach=False"
            )


def _is_grouped(kind: type, options: Mapping[str, Any], main: Tensor) -> bool:
    """Whether torch updates many tensors in one call: they may differ less than in a loop over parameters."""
    asked = options.get("foreach")
    if options.get("fused") or asked is not None:
        return bool(options.get("fused") or asked)
    return not OWN_STEPS[kind].loops_by_itself and main.device.type != "cpu" and not options.get("differentiable")


def _count_fault(
    kind: type, options: Mapping[str, Any], name: str, value: Any, param: MainParam, *, is_captured: bool
) -> str | None:
    """Return why torch cannot use a number that is kept once for a parameter, and the remedy; None if it can."""
    wanted = "number" if name == "step" else "floating point number"
    remedy = f"it must be a tensor of one {wanted}: set it to a 0-d fp32 tensor, or load state that is whole"
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}; {remedy}"
    is_grouped = _is_grouped(kind, options, param.main)
    # ASGD computes with the tensors, others with their values.
    most_dims = value.dim() if not OWN_STEPS[kind].computes_with_counts else 0 if is_grouped else param.main.dim()
    is_real = value.dtype in (_GROUPED_FLOATS if is_grouped else _FLOATS)
    is_count = name == "step" and not is_grouped and _is_integer(value.dtype)
    if value.numel() != 1 or value.dim() > most_dims or not (is_real or is_count):
        return f"has shape {tuple(value.shape)} and dtype {value.dtype}; {remedy}"
    device = param.main.device
    if is_captured and value.device.type != device.type:
        return f"is on {value.device}, but capturable=True needs it on {device}; move it there, or set capturable=False"
    return _write_fault(value, is_grouped=is_grouped)


def _moment_fault(kind: type, options: Mapping[str, Any], name: str, value: Any, param: MainParam) -> str | None:
    """Return why torch cannot use a moment, and the remedy; None if it can."""
    main, shape = param.main, _shape(name, param.main)
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        story = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        needs = "" if shape == tuple(main.shape) else f" and needs {shape}"
        return (
            f"is {story}, but its main param has shape {tuple(main.shape)}{needs}; load state of the same parameters, "
            "in the same order"
        )
    is_widened = value.dtype in HALF_DTYPES and value.shape == main.shape
    is_strict = name in _LERPED or bool(options.get("fused"))
    if not is_widened and value.dtype not in ((main.dtype,) if is_strict else _FLOATS):
        return (
            f"has dtype {value.dtype}, which {kind.__name__} cannot use beside a main param of {main.dtype}; load "
            f"state that is whole, or convert it to {main.dtype}"
        )
    if is_dtensor(value) != is_dtensor(main):
        return (
            f"is a {type(value).__name__}, but its main param is a {type(main).__name__}; distribute both alike, or "
            "load the state dict of the wrapped optimizer"
        )
    if value.device != main.device:
        return f"is on {value.device}, its main param on {main.device}; move it there"
    return _write_fault(to_local(value), is_grouped=_is_grouped(kind, options, main))


def _write_fault(value: Tensor, *, is_grouped: bool) -> str | None:
    """Return why torch cannot write a tensor in place, and the remedy; None if it can."""
    if value.numel() and shares_elements(value):
        story = "has elements that share memory, as expand() makes them"
    elif value._is_zerotensor() or (is_grouped and value.is_neg()):
        story = "has no memory that holds its values"
    elif value.is_inference() and not torch.is_inference_mode_enabled():
        story = "was made in torch.inference_mode()"
    else:
        return None
    return f"{story}, so that torch cannot write it; replace it by a tensor with memory of its own"


def _wanted(value: Any, default: Any, *, takes_any: bool) -> str | None:
    """Return what an option must be that does not fit its default; None if it fits. ``takes_any``: of tensors."""
    if not isinstance(default, tuple):
        return None if not _is_number(default) or _is_number(value, takes_any=takes_any) else "a number"
    if isinstance(value, (tuple, list)) and len(value) == len(default):
        pairs = zip(value, default, strict=True)
        if all(_is_number(one, takes_any=takes_any) or (one is None and usual is None) for one, usual in pairs):
            return None
    return f"{len(default)} numbers"


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _is_number(value: Any, *, takes_any: bool = True) -> bool:
    """Whether it is a real number, or a tensor of one, of any shape if ``takes_any``, else 0-d."""
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and (takes_any or value.dim() == 0)
        return is_one and not value.dtype.is_complex and not value.is_meta
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
