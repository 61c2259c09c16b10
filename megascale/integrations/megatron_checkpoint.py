"""Writes and reads Megatron-Core's torch format of its Float16 and FP32 optimizers' state.

One optimizer is a dict, several (dense and experts) are a list of them::

    {"optimizer": {"state": {id: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [{..., "params": [id, ...]}]},
     "fp32_from_fp16_params": [[main param, ...] of each group], "grad_scaler": {...}}

Ids count the trainable parameters in the order of the groups. An FP32 optimizer is the inner dict alone.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.distributed_optimizer import DistributedOptimizer
from megascale.errors import InteropError, listed
from megascale.grad_scaler import ConstantGradScaler
from megascale.interop.files import read_file
from megascale.interop.megatron import optimizer_state_dict, sub_optimizers
from megascale.interop.naming import not_rounded
from megascale.utils.collectives import raise_together
from megascale.utils.dtypes import HALF_DTYPES

State = dict[str, Any]

CHECKPOINT_KEYS = frozenset(("args", "checkpoint_version", "iteration", "model", "model0"))
"""Keys that distinguish a whole checkpoint, with the state under "optimizer", from an optimizer's state."""

GROUP_IDENTITY = (
    *("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"),
    *("max_lr", "min_lr", "start_wd", "end_wd", "optimizer"),
)
"""Options by which Megatron-Core identifies its param groups (``param_group_identifier_keys`` from 0.19.2 on)."""


SET_BY_OVERRIDES = ("start_wd", "end_wd", "optimizer")
"""Options that a group has only if an override sets them."""


def megatron_state_dict(optimizer: MegascaleOptimizer) -> State | list[State]:
    """Return the state in the form that Megatron's own optimizer loads. Tensors are live, except of sharded state.

    Param groups must have Megatron's keys, as those of ``get_megatron_optimizer`` do. With a DistributedOptimizer all
    ranks call it together, and each gets the whole state in host memory.
    """
    packed = optimizer.state_dict(copy=any(isinstance(one, DistributedOptimizer) for one in optimizer._parts()))
    if isinstance(optimizer.grad_scaler, ConstantGradScaler):
        packed["grad_scaler"] = {}  # Megatron's: its config has the scale
    elif optimizer.grad_scaler is None:
        del packed["grad_scaler"]
    halves = optimizer._config.fp16 or optimizer._config.bf16
    written = [
        _float16(packed, groups) if halves else _inner(packed, groups)
        for groups in split(packed["optimizer"]["param_groups"])
    ]
    return written[0] if len(written) == 1 else written


def split(param_groups: Sequence[State]) -> list[list[State]]:
    """Return the groups of each of Megatron's optimizers: dense ones, then experts' if there are any."""
    dense = [group for group in param_groups if not group.get("is_expert_parallel", False)]
    experts = [group for group in param_groups if group.get("is_expert_parallel", False)]
    return [part for part in (dense, experts) if part] or [[]]


def _float16(packed: Mapping[str, Any], groups: Sequence[State]) -> State:
    mains = packed["main_params"]
    state: State = {
        "optimizer": _inner(packed, groups),
        "fp32_from_fp16_params": [[mains[name] for name in group["params"] if name in mains] for group in groups],
    }
    return state | {key: packed[key] for key in ("grad_scaler",) if key in packed}


def _inner(packed: Mapping[str, Any], groups: Sequence[State]) -> State:
    """Return the torch optimizer's state, keyed by position instead of by name."""
    names = [name for group in groups for name in group["params"]]
    ids = {name: index for index, name in enumerate(names)}
    states = packed["optimizer"]["state"]
    return {
        "state": {ids[name]: states[name] for name in names if states[name]},
        "param_groups": [group | {"params": [ids[name] for name in group["params"]]} for group in groups],
    }


def load_megatron_checkpoint(checkpoint: Any, optimizer: MegascaleOptimizer, *, keep_grad_scaler: bool = False) -> None:
    """Load main params, moments, steps, param group options and scaler of Megatron-Core's Float16 optimizer.

    All ranks of ``groups.grad_stats`` call it together, each with the file of its own model-parallel rank. Load the
    model's weights too: an fp32 parameter has no main param in the file. 16-bit model params are rounded anew from
    their main params. Nothing in the file is executed.

    Args:
        checkpoint: path of a ``model_optim_rng.pt`` (``--ckpt-format torch``), its content, or an optimizer's
            ``state_dict()``. Not changed.
        optimizer: over the same trainable parameters in the same groups and order as Megatron's; frozen ones, which
            Megatron does not save, start anew. A DistributedOptimizer keeps its shard. If the checkpoint has the model
            too, each of its 16-bit weights must be the rounded main param of its name, so that parameters in another
            order are refused.
        keep_grad_scaler: do not change the live grad scaler. Else it goes on from the first of the checkpoint's.

    Raises:
        InteropError, StateDictError, MainParamOverflowError: on every rank alike, naming what does not fit. Nothing has
            changed.
    """
    error: Exception | None = None
    state: State = {}
    try:
        content = _content(checkpoint)
        state = _converted(_optimizer_state(content), optimizer, keep_grad_scaler)
        if differ := not_rounded(state["main_params"], _weights(content)):
            raise InteropError(
                f"the checkpoint's model weights {listed(differ)} are not the main params that would be loaded for "
                "them, rounded: its param groups, or the parameters in them, are in another order than here; build the "
                "same groups in the same order"
            )
    except Exception as caught:  # any failure of one rank must reach the others
        error = caught
    raise_together(error, optimizer._groups.grad_stats)
    optimizer.load_state_dict(state)


def _content(checkpoint: Any) -> Any:
    """Return the content of a file; anything but a path itself."""
    if not isinstance(checkpoint, (str, os.PathLike)):
        return checkpoint
    path = Path(checkpoint)
    if not path.is_file():
        raise InteropError(f"{path} is no file; pass this rank's iter_*/mp_rank_*/model_optim_rng.pt")
    return read_file(path)


def _weights(content: Any) -> dict[str, Any]:
    """Return the model's weights in a checkpoint, by the names that ``get_megatron_optimizer`` gives them.

    Several chunks are under "model0", "model1" and so on.
    """
    if not isinstance(content, Mapping):
        return {}
    chunks = [content[f"model{index}"] for index in range(len(content)) if f"model{index}" in content]
    models = {f"{index}.": chunk for index, chunk in enumerate(chunks)} if len(chunks) > 1 else {}
    models = models or {"": chunks[0] if chunks else content.get("model")}
    return {
        prefix + str(name).removeprefix("module."): weight
        for prefix, weights in models.items()
        if isinstance(weights, Mapping)
        for name, weight in weights.items()
    }


def _optimizer_state(checkpoint: Any) -> Any:
    """Return the optimizer's state in a whole checkpoint, or a state dict."""
    if not isinstance(checkpoint, Mapping) or not CHECKPOINT_KEYS & checkpoint.keys():
        return checkpoint
    if "optimizer" not in checkpoint:
        raise InteropError(
            f"the checkpoint holds no optimizer (it has {sorted(map(str, checkpoint))}); it was saved with "
            "--no-save-optim, or by the distributed optimizer"
        )
    return checkpoint["optimizer"]


def _converted(saved: Any, optimizer: MegascaleOptimizer, keep_grad_scaler: bool) -> State:
    """Return ``saved`` as a state dict of ``optimizer``."""
    parts = [_as_float16(part) for part in sub_optimizers(saved)]
    live = optimizer.param_groups
    _check_groups([group for part in parts for group in _groups_of(part)], live)
    scaler = optimizer.grad_scaler
    if keep_grad_scaler:
        parts = [{key: value for key, value in part.items() if key != "grad_scaler"} for part in parts]
    else:
        _check_scaler([part["grad_scaler"] for part in parts if "grad_scaler" in part], scaler is not None)
    flat = [name for one in optimizer._parts() for name in one._param_names()]
    params = [param for group in live for param in group["params"]]
    name_of = {id(param): name for param, name in zip(params, flat, strict=True)}
    names = [[name_of[id(param)] for param in group["params"] if param.requires_grad] for group in live]
    fp32 = [name_of[id(param)] for param in params if param.dtype not in HALF_DTYPES]
    state = optimizer_state_dict(parts, names, fp32_names=fp32)
    if keep_grad_scaler:
        state["grad_scaler"] = {} if scaler is None else scaler.state_dict()
    frozen = {name_of[id(param)]: param for param in params if not param.requires_grad}
    state["optimizer"]["state"].update({name: {} for name in frozen})
    for group, options in zip(live, state["optimizer"]["param_groups"], strict=True):
        options["params"] = [name_of[id(param)] for param in group["params"]]
    return state


def _as_float16(part: Any) -> Mapping[str, Any]:
    """Return an FP32 optimizer's state, a plain torch one, in the form of a Float16 optimizer's."""
    if not isinstance(part, Mapping):
        raise InteropError(f"the optimizer's state is a {type(part).__name__}; it must be a dict, or a list of them")
    if "param_groups" not in part:
        return part
    return {"optimizer": part, "fp32_from_fp16_params": [[] for _ in part["param_groups"]]}


def _groups_of(part: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the saved param groups that are readable; the conversion raises for others."""
    inner = part.get("optimizer", part.get("optimizer_state_dict"))
    groups = inner.get("param_groups", ()) if isinstance(inner, Mapping) else ()
    return [group for group in groups if isinstance(group, Mapping)]


def _check_groups(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> None:
    """Raise InteropError if a saved group differs in identity from the live group at its index.

    Groups that only overrides of lr, betas or eps make are alike in identity: those are in another order where an
    option has the same values, at other groups.
    """
    for index, (given, group) in enumerate(zip(saved, live, strict=False)):
        for key in GROUP_IDENTITY:
            value, own = given.get(key, given.get(f"pre_{key}")), group.get(key)  # pre_: NeMo's spelling
            if value != own and _is_meaningful(given, key, value) and _is_meaningful(group, key, own):
                raise InteropError(
                    f"param group {index} has {key}={value!r} in the checkpoint and {own!r} here; build the same "
                    "groups in the same order, and change their options when the checkpoint is loaded"
                )
    for key in sorted(set.intersection(*map(set, (*saved, *live))) - {"params", "param_names"}):
        given_values, own_values = (
            [value.tolist() if isinstance(value := group[key], Tensor) else value for group in groups]
            for groups in (saved, live)
        )
        if given_values != own_values and sorted(map(repr, given_values)) == sorted(map(repr, own_values)):
            raise InteropError(
                f"the param groups have {key}={given_values} in the checkpoint and {own_values} here: they are in "
                "another order; build the same groups in the same order"
            )


def _is_meaningful(group: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether ``key`` is meaningful: None is not, in a group of torch's or of a version without it."""
    return value is not None or (key in SET_BY_OVERRIDES and "wd_mult" in group)


def _check_scaler(saved: Sequence[Any], live: bool) -> None:
    """Raise InteropError if only one side has a scaler. Of several that differ the first counts: it scaled the loss."""
    if live and not saved:
        raise InteropError(
            "the checkpoint holds no grad scaler, the optimizer has one; pass keep_grad_scaler=True to go on with the "
            "live scale"
        )
    if saved and not live:
        raise InteropError(
            "the checkpoint holds a grad scaler, the optimizer has none; pass keep_grad_scaler=True to leave it there"
        )
