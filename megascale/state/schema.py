"""The format of the optimizer's state dict, keyed by parameter name, and the checks of one to be loaded.

``{"optimizer": {"state": {name: {...}}, "param_groups": [...]}, "main_params": {name: tensor}, "grad_scaler": {...},
"step_counts": {"landed": int, "skipped": int}, "version": 1}`` holds what :mod:`megascale.utils.portable` lists. A
state dict without ``step_counts``, as of another system, leaves the counts unchanged. State that the wrapped optimizer
keeps for no parameter (``optimizer.state["global"]``) is ``["optimizer"]["shared_state"]``, present only if there is
some: a list with one dict per wrapped optimizer. A load is checked in full before anything changes. Names that differ
by parts of wrappers alone, such as ``module.`` of DistributedDataParallel, are one parameter's; so are a name and a
position.

Moments and options do not depend on the precision of the weights. What does, follows the optimizer that loads:

- main params, fp32, round into weights of any dtype; fp32 weights become the main params themselves;
- a state dict without any, of fp32 weights or a plain torch optimizer, leaves main params as the model's weights are;
- a scaler's state without a scaler is left out, and a scaler without a saved state stays as it was built.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megascale.errors import MainParamOverflowError, StateDictError, listed
from megascale.kernels.compact_moments import SCALE_SUFFIX, num_groups
from megascale.kernels.protocol import FP16_OVERFLOW
from megascale.kernels.remainders import REMAINDER_DTYPE
from megascale.rules import MOMENT_CODES
from megascale.step.compact_state import is_code
from megascale.utils.dtensors import to_local
from megascale.utils.param_names import by_position, renames
from megascale.utils.portable import NO_OPTIONS, PRIMITIVES, plain, portable

VERSION = 1
KEYS = ("optimizer", "main_params", "grad_scaler", "version")
# Options of how torch runs an optimizer, not of what it computes: a load keeps the live ones.
IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
# Key, beside "state", of state that belongs to no parameter: a list with one dict per wrapped optimizer.
SHARED_STATE = "shared_state"
# Its key of what the wrapped optimizer's own state_dict() has beside state and groups.
EXTRA_STATE = "state_dict()"


def pack_group(group: Mapping[str, Any], names: Sequence[str], index: int, *, copy: bool) -> dict[str, Any]:
    """Return a param group's options with its parameters' names under ``params``.

    A rate is a number always. A schedule turns it into a tensor when it first changes, so that types would tell how
    long a program has run, and torch.distributed.checkpoint would not load it into one that has just begun. Where that
    tensor is on an accelerator, reading the number waits for the device.
    """
    options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
    lr = options.get("lr")
    if isinstance(lr, Tensor) and lr.numel() == 1:
        options["lr"] = lr.item()
    return portable(options, f"param_groups[{index}]", copy=copy) | {"params": list(names)}


def check_layout(state_dict: Any, *, strict: bool) -> None:
    """Raise StateDictError unless ``state_dict`` has our keys and version. ``strict``: the scaler's state, too."""
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"state dict must be a dict, got {type(state_dict).__name__}")
    missing = [key for key in KEYS if key not in state_dict and (strict or key != "grad_scaler")]
    if missing:
        remedy = "; load with strict=False to do without" if missing == ["grad_scaler"] else ""
        raise StateDictError(f"state dict lacks {missing}; it has {listed(state_dict)}{remedy}")
    version = state_dict["version"]
    if (isinstance(version, Tensor) and (version.numel() != 1 or version.is_meta)) or version != VERSION:
        raise StateDictError(f"state dict has version {version!r}; this megascale reads version {VERSION}")
    optimizer = state_dict["optimizer"]
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= set(optimizer):
        raise StateDictError("state dict's 'optimizer' must hold 'state' and 'param_groups'")
    for key, value in (("main_params", state_dict["main_params"]), ("optimizer.state", optimizer["state"])):
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise StateDictError(f"state dict's '{key}' must map parameter names to their state")
    groups = optimizer["param_groups"]
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), (list, tuple))
        and all(isinstance(name, str) for name in group["params"])
        for group in groups
    ):
        raise StateDictError(
            "state dict's 'optimizer.param_groups' must be a list of dicts with 'params', a list of parameter names"
        )


def under_live_names(state_dict: Mapping[str, Any], live: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Return ``state_dict``, whose layout was checked, with its parameters under the names that they have here.

    Names that differ by parts of wrappers alone, such as ``module.`` and ``_orig_mod.``, are the same parameter's; so
    are a name and a position. See :mod:`megascale.utils.param_names`, also for the errors. Nothing is copied that need
    not be.

    Args:
        live: the names here, by param group.
    """
    optimizer = state_dict["optimizer"]
    groups = optimizer["param_groups"]
    listed_names = [group["params"] for group in groups]
    given = [*optimizer["state"], *state_dict["main_params"], *chain(*listed_names)]
    new = by_position(listed_names, live, "state dict") or renames(given, [*chain(*live)], "state dict")
    if not new:
        return state_dict
    return {
        **state_dict,
        "optimizer": {
            **optimizer,
            "state": {new.get(name, name): state for name, state in optimizer["state"].items()},
            "param_groups": [
                {**group, "params": [new.get(name, name) for name in group["params"]]} for group in groups
            ],
        },
        "main_params": {new.get(name, name): main for name, main in state_dict["main_params"].items()},
    }


def check_names(given: Iterable[str], known: Iterable[str], required: Iterable[str], what: str) -> None:
    """Raise StateDictError listing names in ``given`` that are not ``known``, and missing ``required`` ones."""
    unexpected = sorted(set(given) - set(known))
    missing = sorted(set(required) - set(given))
    if unexpected or missing:
        raise StateDictError(
            f"{what}: missing {listed(missing) or 'none'}, unexpected {listed(unexpected) or 'none'}; build the "
            "optimizer over the same parameters under the same names; strict=False takes those that both sides have"
        )


def check_groups(given: Sequence[Mapping[str, Any]], live: Sequence[Sequence[str]]) -> None:
    """Raise StateDictError unless both sides have the same parameters in the same groups. ``live``: names by group."""
    if len(given) != len(live):
        raise StateDictError(
            f"state dict has {len(given)} param groups, the optimizer has {len(live)}; build the same groups, "
            "or load with strict=False to keep the live options"
        )
    for index, (group, names) in enumerate(zip(given, live, strict=True)):
        moved = sorted(set(group["params"]) ^ set(names))
        if moved:
            raise StateDictError(
                f"param group {index} differs: {listed(moved)} are on one side only; build the same groups, "
                "or load with strict=False"
            )


def pack_shared(state: Mapping[Any, Any], *, copy: bool) -> dict[str, Any]:
    """Return ``state``, an optimizer's that belongs to no parameter, as ``{"shared_state": [...]}``.

    Empty where there is none. Raises StateDictError naming a key or value that a state dict cannot hold.
    """
    shared = {plain(key): value for key, value in state.items()}
    for key in shared:
        if not isinstance(key, PRIMITIVES):
            raise StateDictError(
                f"optimizer.state has a key {key!r} of type {type(key).__name__}, which a state dict cannot hold; use "
                "parameters and strings"
            )
    packed = {key: portable(value, f"optimizer.state[{key!r}]", copy=copy) for key, value in shared.items()}
    return {SHARED_STATE: [packed]} if packed else {}


def check_shared(given: Any, live: Mapping[Any, Any], *, strict: bool) -> dict[Any, Any]:
    """Return the shared state of one optimizer's state dict. ``live``: what it has here.

    Raises StateDictError if it has another form, or lacks a key that is live.
    """
    [found] = shared_by_optimizer(given, 1, strict=strict)
    missing = [key for key in live if key not in found]
    if missing and strict:
        raise StateDictError(
            f"state dict lacks the optimizer's state[{missing[0]!r}], which belongs to no parameter; load with "
            "strict=False to keep the live one"
        )
    return {key: portable(value, f"optimizer.state[{key!r}]", copy=False) for key, value in found.items()}


def shared_by_optimizer(given: Any, count: int, *, strict: bool) -> list[Mapping[Any, Any]]:
    """Return the shared state of each of ``count`` optimizers, empty where there is none.

    For another number of optimizers: raises StateDictError, or, if not ``strict``, leaves the state out.
    """
    shared = given.get(SHARED_STATE, [])
    if not isinstance(shared, (list, tuple)) or not all(isinstance(one, Mapping) for one in shared):
        raise StateDictError(f"state dict's 'optimizer.{SHARED_STATE}' must be a list of dicts")
    if len(shared) == count:
        return list(shared)
    if shared and strict:
        raise StateDictError(
            f"state dict's 'optimizer.{SHARED_STATE}' is that of {len(shared)} optimizers, here are {count}; chain as "
            "many, or load with strict=False to leave it out"
        )
    return [{}] * count


def placed_like(value: Any, live: Any) -> Any:
    """Return a copy of portable ``value``, each tensor on the device of its counterpart in ``live``, if any."""
    if isinstance(value, Tensor):
        return value.to(live.device, copy=True) if isinstance(live, Tensor) else value.clone()
    if isinstance(value, Mapping):
        entries = live if isinstance(live, Mapping) else {}
        return {key: placed_like(item, entries.get(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = live if isinstance(live, (list, tuple)) and len(live) == len(value) else [None] * len(value)
        return type(value)([placed_like(item, other) for item, other in zip(value, items, strict=True)])
    return value


def loadable_options(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of the options of a saved group that a live group takes over."""
    taken = {key: value for key, value in group.items() if key not in ("params", *IMPLEMENTATION_OPTIONS)}
    return portable(taken, f"param_groups[{index}]", copy=True)


def check_state(name: str, state: Any, param: Tensor, required: Collection[str]) -> None:
    """Raise StateDictError for one parameter's saved state that is not portable or not complete.

    Each of ``required`` must be there, in the parameter's shape (``step``: one element), codes with their scales.
    """
    if not isinstance(state, Mapping):
        raise StateDictError(f"optimizer state of {name!r} must be a dict, got {type(state).__name__}")
    for key in required:
        if key not in state:
            raise StateDictError(f"optimizer state of {name!r} lacks {key!r}; it has {sorted(map(str, state))}")
        if key != "step":
            check_tensor(name, key, state[key], param)
        if is_code(key, state[key]):
            scale = state.get(f"{key}{SCALE_SUFFIX}")
            groups = num_groups(param.numel())
            if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != groups:
                raise StateDictError(
                    f"{key} of {name!r} is held as {state[key].dtype} codes and needs {key}{SCALE_SUFFIX}, a "
                    f"torch.float32 tensor of {groups} scales; save the whole state"
                )
    step = state.get("step", 0)
    if not isinstance(step, (int, float)) and not (
        isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex()
    ):
        described = f"{step.dtype} tensor" if isinstance(step, Tensor) else f"{step!r} of type {type(step).__name__}"
        raise StateDictError(f"optimizer state of {name!r} has a step that is not one number: {described}")
    portable(state, f"state[{name!r}]", copy=False)
    for key, value in state.items():
        _require_values(f"{key} of {name!r}", value)


def check_tensor(name: str, what: str, value: Any, like: Tensor) -> None:
    """Raise StateDictError unless ``value`` is a floating point tensor, or codes, of the shape of ``like``."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or is_code(what, value)):
        codes = f" or {MOMENT_CODES[what]} codes" if what in MOMENT_CODES else ""
        described = (
            f"{value.dtype} tensor" if isinstance(value, Tensor) else f"{value!r} of type {type(value).__name__}"
        )
        raise StateDictError(
            f"{what} of {name!r} must be a floating point tensor{codes}, got {described}; load what was saved"
        )
    if value.shape != like.shape:
        raise StateDictError(
            f"{what} of {name!r} has shape {tuple(value.shape)}, the parameter has {tuple(like.shape)}; build the "
            "model as it was saved. Of a DistributedOptimizer save what state_dict() returns: its state holds pieces"
        )


def check_main_param(name: str, value: Any, model: Tensor) -> None:
    """Raise StateDictError unless ``value`` can be the main param of ``model``: its shape, and fp32 or fp64."""
    if isinstance(value, Tensor) and value.dtype == REMAINDER_DTYPE:
        raise StateDictError(
            f"main param of {name!r} is held as a remainder ({value.dtype}), which means nothing without the weights "
            "beside it; save and load with megascale.checkpoint, or save state_dict(), which has fp32"
        )
    check_tensor(name, "main param", value, model)
    _require_values(f"main param of {name!r}", value)
    if value.dtype not in (torch.float32, torch.float64):
        raise StateDictError(f"main param of {name!r} has dtype {value.dtype}; main params are fp32")


@torch.no_grad()
def check_fits_model(name: str, main: Tensor, model: Tensor) -> None:
    """Raise MainParamOverflowError unless ``main`` is finite after rounding to the model param's dtype."""
    if model.dtype == torch.float16 and bool((to_local(main).abs() >= FP16_OVERFLOW).any()):
        raise MainParamOverflowError(
            f"main param of {name!r} holds values of {FP16_OVERFLOW:.0f} or more, which round to inf in fp16; "
            "train this model in bf16"
        )


def _require_values(what: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.is_meta:
        raise StateDictError(f"{what} is on the meta device and has no values; save a state dict that has them")
