"""Reads DeepSpeed's flat groups as named tensors: a group's main params end to end, sharded over ranks by ZeRO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.errors import InteropError
from megascale.interop.deepspeed import MODEL_FILES, OPTIMIZER_FILES, SYSTEM, checkpoint
from megascale.interop.files import read_file
from megascale.interop.megatron import named_float16_state
from megascale.interop.named_state import (
    FoundState,
    Names,
    by_group,
    check_adam,
    is_torch_state,
    named,
    own,
    step_tensor,
    weights_in,
)
from megascale.interop.naming import REMEDY, check_rounding, names_by_rounding
from megascale.interop.records import number_of
from megascale.interop.source import Source

STAY = "model weights, LR schedule, counters and random states stay in the file"


@dataclass(frozen=True)
class FlatGroup:
    """One param group.

    Attributes:
        shapes: by parameter name, in the order of the flat tensor.
        main: all main params, flat, fp32.
        state: flat tensors of the same layout, and single numbers.
        options: of the param group.
        gaps: unused elements after each parameter.
        padding: most unused elements at the end.
    """

    shapes: Mapping[str, Sequence[int]]
    main: Tensor
    state: Mapping[str, Any]
    options: Mapping[str, Any]
    gaps: Sequence[int] = field(default_factory=tuple)
    padding: int = 0


def find_state(source: Source, names: Names | None = None) -> FoundState | None:
    """Return main params and optimizer state of ZeRO stage 1 and 2, or of DeepSpeed's optimizers without ZeRO.

    Names and shapes are recorded by ZeRO. Without it they are the model's own, in its order, if there is one group.
    In both cases the model's 16-bit weights must be their rounded main params, bit for bit.

    Raises:
        InteropError: it cannot be read or mapped, with the reason.
    """
    where, model = _model(source)
    shards = _shards(source)
    if shards:
        if names is not None:
            raise InteropError(f"{where} records the parameters' names, which ZeRO needs; give none")
        found = _unflatten(_zero_groups(shards, model, where), where)
    elif isinstance(saved := model.get("optimizer"), Mapping):
        found = _without_zero(saved, model, names, where)
    else:
        return None
    check_rounding(found.main_params, model["module"], where)
    return found


def _model(source: Source) -> tuple[str, Mapping[str, Any]]:
    """Return the file of the model's states, and its content."""
    folder = checkpoint(source)
    files = folder.files(*MODEL_FILES)
    if source.folder is None:
        where, content = source.where, source.content
    elif len(files) == 1:
        where, content = str(files[0]), read_file(files[0])
    elif not files:
        raise InteropError(f"{folder.where} lacks {MODEL_FILES[0]}, which has the weights; copy it, too")
    else:
        raise InteropError(
            f"{folder.where} holds {len(files)} files of model states: model parallelism, or ZeRO-3, whose parameters "
            "are cut over ranks, is not read; take the scaler alone, or save a consolidated checkpoint"
        )
    if not isinstance(content, Mapping) or not isinstance(content.get("module"), Mapping):
        raise InteropError(f"{where} holds no model of DeepSpeed's; pass the checkpoint's folder")
    return where, content


def _shards(source: Source) -> list[Mapping[str, Any]]:
    """Return the optimizer states of ZeRO's ranks, in their order; none without ZeRO."""
    files = sorted(checkpoint(source).files(*OPTIMIZER_FILES), key=_data_parallel_rank)
    shards = [read_file(path)["optimizer_state_dict"] for path in files]
    for path, shard in zip(files, shards, strict=True):
        stage, counts = number_of(shard.get("zero_stage")), shard.get("partition_count")
        if stage not in (1, 2) or "single_partition_of_fp32_groups" not in shard:
            raise InteropError(f"{path} is of ZeRO stage {stage}; stages 1 and 2 are read; take the scaler alone")
        for count in counts if isinstance(counts, (list, tuple)) else [counts]:
            if count != len(files):
                raise InteropError(
                    f"{path} is one of {count} partitions, and {len(files)} files are beside one another "
                    f"({', '.join(one.name for one in files)}): put there all files of one save, and no other"
                )
    return shards


def _data_parallel_rank(path: Path) -> int:
    digits = path.name.partition("zero_pp_rank_")[2].partition("_")[0]
    return int(digits) if digits.isdigit() else 0


def _zero_groups(shards: Sequence[Mapping[str, Any]], model: Mapping[str, Any], where: str) -> list[FlatGroup]:
    """Return the groups of ZeRO's shards, concatenated; padding is only at the end of the last shard."""
    shapes = model.get("param_shapes")
    count = len(shards[0]["single_partition_of_fp32_groups"])
    if not isinstance(shapes, (list, tuple)) or len(shapes) != count:
        raise InteropError(f"{where} does not record the shapes of the parameters in the {count} groups")
    bases = [shard.get("base_optimizer_state") for shard in shards]
    groups = []
    for index in range(count):
        states = [_group_state(base, index, where) for base in bases]
        gaps = (shards[0].get("param_alignment_paddings") or [()] * count)[index]
        if gaps and len(gaps) != len(shapes[index]):
            raise InteropError(f"{where} records {len(shapes[index])} shapes and {len(gaps)} gaps of group {index}")
        whole = torch.cat([shard["single_partition_of_fp32_groups"][index] for shard in shards])
        flat = {
            key: torch.cat([state[key] for state in states]) if _is_flat(value) else value
            for key, value in states[0].items()
        }
        options = bases[0]["param_groups"][index] if is_torch_state(bases[0]) else {}
        if "step" not in flat and flat and "base_optimizer_state_step" in shards[0]:
            flat["step"] = shards[0]["base_optimizer_state_step"]
        # ZeRO aligns its partitions to four bytes of fp16.
        padding = 2 * len(shards) - 1
        groups.append(FlatGroup(shapes[index], whole, flat, options, gaps, padding))
    return groups


def _group_state(base: Any, index: int, where: str) -> Mapping[str, Any]:
    """Return a group's state: from a torch state dict, or from the list of an elastic checkpoint."""
    if is_torch_state(base):
        key = base["param_groups"][index]["params"][0]
        state = base["state"].get(key, {})
    elif isinstance(base, (list, tuple)) and index < len(base):
        state = base[index]
    else:
        raise InteropError(f"{where}: base_optimizer_state is neither a torch optimizer's state dict nor a list")
    if not isinstance(state, Mapping):
        raise InteropError(f"{where}: the optimizer state of group {index} cannot be read")
    return state


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _without_zero(saved: Mapping[str, Any], model: Mapping[str, Any], names: Names | None, where: str) -> FoundState:
    """Return the state of FP16_Optimizer (flat) or FP16_UnfusedOptimizer (a main param for each parameter)."""
    module, base = model["module"], saved.get("optimizer_state_dict")
    if not is_torch_state(base):
        raise InteropError(f"{where} holds no optimizer of DeepSpeed's with main params; it may be torch's own")
    if "fp32_groups" in saved:
        mains = saved["fp32_groups"]
        own_names = names or names_by_rounding(mains, module, where)
        part = {"optimizer": base, "fp32_from_fp16_params": mains}
        found = named_float16_state([part], own_names, fp32_names=(), where=where)
        return FoundState(SYSTEM, found.groups, found.states, found.main_params, _mapped(found.main_params), (STAY,))
    mains = saved.get("fp32_groups_flat") or []
    grouped = _module_names(model, mains, names, where)
    groups = [
        FlatGroup({name: module[name].shape for name in own_names}, main, _group_state(base, index, where), group)
        for index, (own_names, main, group) in enumerate(zip(grouped, mains, base["param_groups"], strict=True))
    ]
    return _unflatten(groups, where)


def _module_names(
    model: Mapping[str, Any], mains: Sequence[Tensor], names: Names | None, where: str
) -> list[list[str]]:
    """Return names by flat group: given, or all of the model's weights in one group."""
    buffers = set(model.get("buffer_names") or ())
    weights = [name for name in weights_in(model["module"]) if name not in buffers]
    if names is None:
        if len(mains) != 1:
            raise InteropError(f"{where} does not record which parameter is in which of {len(mains)} groups; {REMEDY}")
        return [weights]
    sizes = [len(names)] if all(isinstance(entry, str) for entry in names) else [len(group) for group in names]
    grouped = by_group(names, sizes, where)
    if len(grouped) != len(mains) or not {*chain(*grouped)} <= set(weights):
        raise InteropError(f"{where} has {len(mains)} groups, of the weights {', '.join(weights)}; got {grouped}")
    return grouped


def _unflatten(groups: Sequence[FlatGroup], where: str) -> FoundState:
    found = FoundState(SYSTEM)
    recorded = True
    for index, group in enumerate(groups):
        check_adam(group.options, f"{where}, group {index}")
        found.main_params.update(_unflattened(group.main.float(), group, f"{where}, group {index}"))
        states: dict[str, dict[str, Any]] = {name: {} for name in group.shapes}
        for key, value in group.state.items():
            if _is_flat(value):
                for name, tensor in _unflattened(value, group, f"{where}, group {index}, {key}").items():
                    states[name][key] = tensor
            else:
                for state in states.values():
                    state[key] = step_tensor(value) if key == "step" else value
        found.states.update(states)
        recorded &= bool(group.options)
        empty = {"state": {}, "param_groups": [{**group.options, "params": list(group.shapes)}]}
        found.groups.extend(named(empty, [list(group.shapes)], where)[0])
    notes = [STAY, "which optimizer it was is not recorded: build it with the options of the run"]
    if not recorded:
        notes.append("an elastic checkpoint does not record the groups' options: those of your optimizer stay")
    return FoundState(SYSTEM, found.groups, found.states, found.main_params, _mapped(found.main_params), tuple(notes))


def _mapped(mains: Mapping[str, Tensor]) -> tuple[str, ...]:
    return (f"{len(mains)} main params, the optimizer's state and its groups' options",)


def _unflattened(flat: Tensor, group: FlatGroup, where: str) -> dict[str, Tensor]:
    """Return the parameters' parts of a flat tensor, each in its own memory.

    Raises:
        InteropError: it is too short, or longer than padding explains.
    """
    parts: dict[str, Tensor] = {}
    offset = 0
    gaps = group.gaps or [0] * len(group.shapes)
    for (name, shape), gap in zip(group.shapes.items(), gaps, strict=True):
        numel = prod(shape)
        if offset + numel > flat.numel():
            raise InteropError(f"{where} has {flat.numel()} elements, {name!r} of shape {tuple(shape)} lies beyond")
        parts[name] = own(flat[offset : offset + numel]).reshape(tuple(shape))
        offset += numel + gap
    if flat.numel() - offset > group.padding:
        raise InteropError(f"{where} has {flat.numel()} elements, the recorded parameters take {offset}")
    return parts
