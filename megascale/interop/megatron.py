"""Reads Megatron-Core's torch-format checkpoints, ``mp_rank_00/model_optim_rng.pt``, and optimizers' state dicts.

Source: ``megatron/core/optimizer`` of Megatron-Core 0.16 to 0.20. Its Float16 optimizer saves ``{"optimizer": a
torch optimizer's state dict over main params, "grad_scaler": {...}, "fp32_from_fp16_params": [[main params] of each
group]}``; its ChainedOptimizer a list of those, or a dict by index.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megascale.errors import InteropError
from megascale.interop import deepspeed
from megascale.interop.files import read_file
from megascale.interop.named_state import (
    FoundState,
    Names,
    by_group,
    check_shapes,
    is_torch_state,
    named,
    own,
    sizes_of,
    weights_in,
)
from megascale.interop.naming import check_rounding, names_by_rounding
from megascale.interop.records import attributes_of
from megascale.interop.scaler_state import (
    NO_CEILING,
    FoundScaler,
    ScalerConfig,
    as_int,
    checked_scale,
    constant,
    dynamic,
)
from megascale.interop.source import Source
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.validate import LARGEST_SCALE

SYSTEM = "Megatron-Core"
SCALER_KEYS = {"scale", "growth_tracker", "hysteresis_tracker"}
MAIN_KEYS = ("fp32_from_fp16_params", "fp32_from_fp16")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")
FIRST = "its optimizers' grad scalers differ: the first one's state is taken, which has scaled the loss"
ITERATION_FILE = "latest_checkpointed_iteration.txt"
RANK_FILES = ("mp_rank_*/model_optim_rng.pt",)
WAY_OUT = (
    "Megatron's own training command rewrites a torch_dist checkpoint with --load FOLDER --ckpt-convert-format torch "
    "--ckpt-convert-save DIR: it saves into DIR/torch and ends. Of a distributed optimizer that covers the model's "
    "weights and the loss scale; its main params and moments go into distrib_optim.pt, which is not read either"
)
"""See Megatron-LM's megatron/training/training.py and checkpointing.py, at d98e8a64ddf3."""


# Checkpoints


def recognises(source: Source) -> bool:
    """Whether ``source`` is a Megatron-Core checkpoint folder, its file, an optimizer's state dict, or a scaler's."""
    if source.folder is not None:
        # common.pt is a file of the torch_dist format, whose error says what to do.
        return (source.folder / ITERATION_FILE).is_file() or bool(checkpoint(source).files(*RANK_FILES, "common.pt"))
    return _is_scaler(source.content) or bool(_optimizers(source.content))


def checkpoint(source: Source) -> Source:
    """Return the folder of one iteration: ``source``, or the folder that its tracker file names."""
    for tracker in filter(Path.is_file, source.files(ITERATION_FILE)):
        word = tracker.read_text().strip()
        if not (word.isdigit() or word == "release"):
            raise InteropError(f"{tracker} names iteration {word[:40]!r}, which is neither a number nor 'release'")
        folder = tracker.parent / (f"iter_{int(word):07d}" if word.isdigit() else word)
        return Source(str(folder), folder=folder)
    return source


def _rank_file(source: Source, *, only: bool) -> Source:
    """Return the content of a folder's first rank. ``only``: it must be the only one."""
    if source.folder is None:
        return source
    folder = checkpoint(source)
    files: list[Path] = folder.files(*RANK_FILES)
    if not files:
        raise InteropError(
            f"{folder.where} holds no mp_rank_*/model_optim_rng.pt: it was not saved with --ckpt-format torch. "
            f"{WAY_OUT}"
        )
    if only and len(files) > 1:
        raise InteropError(
            f"{folder.where} holds {len(files)} model-parallel ranks, each with parameters of its own; convert each "
            f"rank's file by itself: {files[0]} ..."
        )
    return Source(str(files[0]), read_file(files[0]))


def sub_optimizers(saved: Any) -> list[Mapping[str, Any]]:
    """Return the state dicts of a ChainedOptimizer's optimizers, or of one other optimizer."""
    if isinstance(saved, (list, tuple)):
        return list(saved)
    if isinstance(saved, Mapping) and saved and all(isinstance(key, int) for key in saved):
        return [saved[key] for key in sorted(saved)]
    return [saved]


def _is_scaler(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() >= SCALER_KEYS


def _is_float16_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and (
        "grad_scaler" in value or any(key in value for key in MAIN_KEYS) or "loss_scaler" in value
    )


def _optimizers(content: Any) -> list[Mapping[str, Any]]:
    """Return the Float16 optimizers' state dicts in ``content``: a checkpoint, an optimizer's state, or a list."""
    for saved in (content, content.get("optimizer") if isinstance(content, Mapping) else None):
        parts = sub_optimizers(saved) if saved is not None else []
        if parts and all(_is_float16_optimizer(part) for part in parts):
            return parts
    return []


# The scaler


def find_scaler(source: Source) -> FoundScaler | None:
    """Return the scaler's state, or None; of a ChainedOptimizer's the first. Raises InteropError for a bad one."""
    source = _rank_file(source, only=False)
    args = attributes_of(source.entry("args")) if source.entry("args") is not None else {}
    if _is_scaler(source.content):
        return parse(source.content, args)
    parts = _optimizers(source.content)
    states = [scaler for scaler in map(_scaler_of, parts) if scaler is not None]
    if not states:
        return None
    if "cur_scale" in attributes_of(states[0]):
        return deepspeed.parse(states[0], {})
    return parse(states[0], args, (FIRST,) if any(state != states[0] for state in states) else ())


def _scaler_of(optimizer: Mapping[str, Any]) -> Any:
    return optimizer.get("grad_scaler", optimizer.get("loss_scaler"))


def parse(state: Mapping[str, Any], args: Mapping[str, Any], notes: tuple[str, ...] = ()) -> FoundScaler:
    """Return the scaler in a grad scaler's state. ``args``: the options saved beside it, if any.

    Megatron-Core's hysteresis tracker may be below 0, which has the same effect as 0.
    """
    if not state or args.get("loss_scale"):
        scale = state.get("scale", args.get("loss_scale") or None)
        if scale is None:
            notes = (*notes, "a constant scaler's state is empty: the scale is not recorded")
        return constant(SYSTEM, scale, mapped=("a constant scale",), not_mapped=notes)
    if missing := sorted(SCALER_KEYS - set(state)):
        raise InteropError(f"{SYSTEM}'s grad scaler state lacks {', '.join(missing)}; it is not whole")
    recorded = {
        name: None if args.get(option) is None else as_int(SYSTEM, option, args[option], minimum=1)
        for name, option in (("growth_interval", "loss_scale_window"), ("hysteresis", "hysteresis"))
    }
    floor = args.get("min_loss_scale")
    config = ScalerConfig(
        growth_interval=recorded["growth_interval"],
        hysteresis=recorded["hysteresis"],
        min_scale=None if floor is None else checked_scale(SYSTEM, floor),
        max_scale=LARGEST_SCALE,
    )
    tracker = as_int(SYSTEM, "hysteresis_tracker", state["hysteresis_tracker"], minimum=-(2**62))
    if args:
        source = "args: loss_scale_window, hysteresis, min_loss_scale"
    else:
        source = "its own: factors 2 and 0.5; window, hysteresis and min_scale are in no state dict"
    return dynamic(
        SYSTEM,
        state["scale"],
        state["growth_tracker"],
        max(tracker, 0),
        config,
        mapped=("scale, growth_tracker, hysteresis_tracker", source),
        not_mapped=(*notes, NO_CEILING.format(system=SYSTEM)),
    )


# Main params and moments


def find_state(source: Source, names: Names | None = None) -> FoundState | None:
    """Return main params and optimizer state; None if there is only a scaler's state.

    ``names``: of the parameters; None: they are found by rounding the main params.

    Raises:
        InteropError: it cannot be read or mapped, saying why.
    """
    source = _rank_file(source, only=True)
    parts = _optimizers(source.content)
    if not parts and _is_scaler(source.content):
        return None
    model = source.entry("model")
    weights: Mapping[str, Any] = model if isinstance(model, Mapping) else {}
    for part in parts:
        _main_params(part, source.where)
    if names is None:
        _check_all_half(parts, source.where)
        names = names_by_rounding(
            [group for part in parts for group in _main_params(part, source.where)], weights, source.where
        )
    fp32 = [name for name, weight in weights_in(weights).items() if weight.dtype not in HALF_DTYPES]
    found = named_float16_state(parts, names, fp32_names=fp32, where=source.where)
    check_rounding(found.main_params, weights, source.where)
    for name in found.states:
        if name in fp32:
            found.main_params[name] = own(weights[name]).float()
    return FoundState(
        SYSTEM,
        found.groups,
        found.states,
        found.main_params,
        mapped=(f"{len(found.main_params)} main params, the optimizer's state and its groups' options",),
        not_mapped=("model weights, iteration, random states and LR schedule stay in the file",),
    )


def optimizer_state_dict(saved: Any, names: Names, *, fp32_names: Collection[str] = ()) -> dict[str, Any]:
    """Return Megatron-Core's optimizer state dict as megascale's, for ``MixedPrecisionOptimizer.load_state_dict``.

    Args:
        saved: a Float16 optimizer's ``state_dict()``, or a ChainedOptimizer's list of them. Unchanged.
        names: parameter names by param group (of all chained optimizers, in order), or flat in that order.
        fp32_names: those that are fp32 in the model and so have no entry in ``fp32_from_fp16_params``.

    Raises:
        InteropError: it cannot be read or mapped, saying why.
    """
    parts = sub_optimizers(saved)
    where = "Megatron-Core's optimizer state"
    found = named_float16_state(parts, names, fp32_names=fp32_names, where=where)
    states = [part["grad_scaler"] for part in parts if "grad_scaler" in part]
    return found.state_dict(parse(states[0], {}).state if states else {})


def named_float16_state(
    parts: Sequence[Mapping[str, Any]], names: Names, *, fp32_names: Collection[str], where: str
) -> FoundState:
    """Return the joined, named state of several Float16 optimizers."""
    inner = [_inner(part, where) for part in parts]
    grouped = by_group(names, [size for saved in inner for size in sizes_of(saved)], where)
    found = FoundState(SYSTEM)
    for part, saved in zip(parts, inner, strict=True):
        own_names, grouped = grouped[: len(saved["param_groups"])], grouped[len(saved["param_groups"]) :]
        groups, states = named(saved, own_names, where)
        mains = _main_params(part, where)
        if len(mains) != len(own_names):
            raise InteropError(f"{where} has main params of {len(mains)} groups, the optimizer has {len(own_names)}")
        for index, (tensors, group) in enumerate(zip(mains, own_names, strict=True)):
            halves = [name for name in group if name not in fp32_names]
            if len(halves) != len(tensors):
                raise InteropError(
                    f"{where}: group {index} has {len(tensors)} main params for {len(halves)} 16-bit parameters; "
                    "say which parameters are fp32 in the model"
                )
            found.main_params.update({name: own(t).float() for name, t in zip(halves, tensors, strict=True)})
        found.groups.extend(groups)
        found.states.update(states)
    check_shapes(found.states, found.main_params, where)
    return found


def _inner(part: Any, where: str) -> Mapping[str, Any]:
    """Return the torch optimizer's state dict inside a Float16 optimizer's."""
    saved = next((part[key] for key in OPTIMIZER_KEYS if key in part), None) if isinstance(part, Mapping) else None
    if not is_torch_state(saved):
        raise InteropError(
            f"{where} holds no torch optimizer's state under 'optimizer': Megatron-Core's distributed optimizer keeps "
            "it in distrib_optim.pt, which is not read; the scaler can be taken alone"
        )
    return saved


def _main_params(part: Mapping[str, Any], where: str) -> Sequence[Sequence[Tensor]]:
    mains = next((part[key] for key in MAIN_KEYS if key in part), None)
    if mains is None:
        raise InteropError(
            f"{where} has no fp32_from_fp16_params: it was saved by the distributed optimizer, whose shards are not "
            "read; the scaler can be taken alone"
        )
    if not isinstance(mains, (list, tuple)) or not all(
        isinstance(group, (list, tuple)) and all(isinstance(tensor, Tensor) for tensor in group) for group in mains
    ):
        raise InteropError(f"{where}: fp32_from_fp16_params must be a list of lists of tensors")
    return mains


def _check_all_half(parts: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise InteropError if a parameter has no main param, as its name cannot be found by rounding."""
    for part in parts:
        counts = [len(group) for group in _main_params(part, where)]
        if counts != (sizes := sizes_of(_inner(part, where))):
            raise InteropError(
                f"{where} has groups of {sizes} parameters and {counts} main params: some parameters are fp32, and "
                "their names must be given: --model-names FILE"
            )
