"""Reads DeepSpeed's flat groups as named tensors: a group's main params end to end, sharded over ranks by ZeRO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.errors import InteropError
from megascale.interop.deepspeed import MODEL_FILES, OPTIMIZER_FILES, SYSTEM, checkpoint
from megascale.interop.files import read_file
from megascale.interop.named_state import (
    FoundState,
    Names,
    check_adam,
    is_torch_state,
    named,
    own,
    step_tensor,
)
from megascale.interop.naming import check_rounding
from megascale.interop.records import number_of
from megascale.interop.source import Source

SCALER_ALONE = "take the scaler alone (scaler_only=True, or --scaler-only of megascale convert)"
"""What remains where main params are not read."""


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
    gaps: Sequence[int]
    padding: int


def find_state(source: Source, names: Names | None = None) -> FoundState | None:
    """Return main params and optimizer state of ZeRO stage 1 and 2, which records names and shapes.

    The model's 16-bit weights must be their rounded main params, bit for bit.

    Raises:
        InteropError: it cannot be read or mapped, with the reason.
    """
    where, model = _model(source)
    shards = _shards(source)
    if not shards and isinstance(model.get("optimizer"), Mapping):
        raise InteropError(
            f"{where} was saved without ZeRO, and main params are read of its stages 1 and 2; {SCALER_ALONE}"
        )
    if not shards:
        return None
    if names is not None:
        raise InteropError(f"{where} records the parameters' names, which ZeRO needs; give none")
    found = _unflatten(_zero_groups(shards, model, where), where)
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
            f"are cut over ranks, is not read; {SCALER_ALONE}, or save a consolidated checkpoint"
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
            raise InteropError(f"{path} is of ZeRO stage {stage}; stages 1 and 2 are read; {SCALER_ALONE}")
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
    bases: list[Any] = [shard.get("base_optimizer_state") for shard in shards]
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
        options = bases[0]["param_groups"][index]
        # ZeRO aligns its partitions to four bytes of fp16.
        padding = 2 * len(shards) - 1
        groups.append(FlatGroup(shapes[index], whole, flat, options, gaps, padding))
    return groups


def _group_state(base: Any, index: int, where: str) -> Mapping[str, Any]:
    """Return the state of a group, which is one parameter to the torch optimizer inside."""
    if not is_torch_state(base):
        raise InteropError(
            f"{where}: base_optimizer_state is no torch optimizer's state dict; save without elastic_checkpoint"
        )
    state = base["state"].get(base["param_groups"][index]["params"][0], {})
    if not isinstance(state, Mapping):
        raise InteropError(f"{where}: the optimizer state of group {index} cannot be read")
    return state


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _unflatten(groups: Sequence[FlatGroup], where: str) -> FoundState:
    found = FoundState(SYSTEM)
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
        empty = {"state": {}, "param_groups": [{**group.options, "params": list(group.shapes)}]}
        found.groups.extend(named(empty, [list(group.shapes)], where)[0])
    return replace(
        found,
        mapped=(f"{len(found.main_params)} main params, the optimizer's state and its groups' options",),
        not_mapped=(
            "model weights, LR schedule, counters and random states stay in the file",
            "which optimizer it was is not recorded: build it with the options of the run",
        ),
    )


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
