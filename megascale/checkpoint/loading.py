"""load(): everything is read and checked before anything live changes, except shards, which are read in place.

A rank's shard of main params and optimizer state may not fit into memory twice. So it is checked first, on all ranks,
without its values, and then read into the live memory itself.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale.base_optimizer import MegascaleOptimizer
from megascale.checkpoint import directory as folders
from megascale.checkpoint import remainders, renaming
from megascale.checkpoint.agreement import gathered, named, raise_on_all_ranks
from megascale.checkpoint.contents import (
    bare,
    check_types,
    compare_model,
    model_state,
    model_tree,
    require_one_kind,
    tree_of,
)
from megascale.checkpoint.files import PlannedRead
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import Tree, unflatten
from megascale.checkpoint.read_targets import ReadTargets
from megascale.errors import CheckpointError, MegascaleError
from megascale.main_params.shard import ParamShard
from megascale.parallel import ParallelGroups
from megascale.utils import validate
from megascale.utils.collectives import group_rank, group_size
from megascale.utils.dtypes import HALF_DTYPES

Groups = ParallelGroups | ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of a load.

    Attributes:
        step: the step that was given to `save`.
        path: the checkpoint's folder.
        user_state: as given to `save`, tensors on the host; None if none was.
        rank_state: as this rank gave it to `save`; None if it gave none, or if another number of ranks saved.
        skipped: with ``strict=False``, one line for everything of the model that was not loaded.
    """

    step: int
    path: Path
    user_state: Any
    rank_state: Any
    skipped: tuple[str, ...]


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: MegascaleOptimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    groups: Groups = None,
) -> LoadedCheckpoint:
    """Load a checkpoint into the model and the optimizer; all ranks call it together, at any world size.

    Everything is checked first. On an error nothing has changed in model, optimizer or grad scaler, with one exception:
    if a DistributedOptimizer's files become unreadable after their checksums were verified, the error says that it must
    be loaded again. A DistributedOptimizer and a MixedPrecisionOptimizer read each other's checkpoints.

    Additional memory: a DistributedOptimizer's shards are read in place, one saved piece of one parameter at a time.
    All else, such as a MixedPrecisionOptimizer's whole state, needs a second copy on the host.

    Args:
        path: a directory of checkpoints (the latest is taken, or the one of ``step``), or one checkpoint's folder.
        model: gets the saved weights and buffers, rounded where they were saved in another precision. Of fp32 weights
            and a model in 16 bits the optimizer's main params are the weights as they were saved.
        optimizer: gets its state, main params and grad scaler. None: only weights are loaded; a MixedPrecisionOptimizer
            of this model takes them over at its next step.
        step: which checkpoint.
        strict: raise if a name or shape differs, or floating point with integers. False loads what fits; with an
            optimizer names may differ, but no shapes of its parameters.
        groups: as for :class:`Checkpointer`.

    Raises:
        CheckpointError: no checkpoint there, a file is missing or damaged, or it does not fit the model.
        StateDictError: it does not fit the optimizer. On all ranks alike, with the rank that found it in the message.
    """
    group = ParallelGroups.of(groups).grad_stats
    with named("load the checkpoint"):
        with raise_on_all_ranks("load the checkpoint", group) as kinds:
            root = validate.path("path", path)
            kinds.append(check_types(model, optimizer))
            validate.flag("strict", strict)
            if step is not None:
                validate.integer("step", step, minimum=0)
        require_one_kind(kinds)
        folder = _found_together(root, step, group)
        with raise_on_all_ranks(f"read the manifest of {folder}", group):
            manifest = Manifest.read(folder)
        with raise_on_all_ranks(f"verify {folder}", group):
            manifest.verify(folder, part=group_rank(group), parts=group_size(group))
        found: list[_Staged] = []

        def stage() -> bool:
            found.append(_stage(folder, manifest, model, optimizer, strict, group))
            return found[0].in_place is not None

        # A rank that owns nothing reads nothing in place, and must take part where others do.
        is_in_place = any(gathered(f"read {folder}", stage, group))
        [staged] = found
        if optimizer is not None and staged.optimizer_state is not None:
            if is_in_place:
                _load_in_place(folder, optimizer, staged.optimizer_state, staged.in_place, strict, group)
            else:  # validates all of it, on all ranks, before it changes anything
                optimizer.load_state_dict(staged.optimizer_state, strict=strict)
        with raise_on_all_ranks("load the weights into the model", group):
            bare(model).load_state_dict(staged.weights, strict=False)
            if optimizer is not None and staged.optimizer_state is None:
                optimizer.reload_model_params()
    return LoadedCheckpoint(manifest.step, folder, staged.user_state, staged.rank_state, staged.problems)


@dataclass(frozen=True)
class _Staged:
    """A checkpoint that is read and checked, but not yet copied into anything live.

    Attributes:
        in_place: the reads into live shards that are still to be done; ``optimizer_state`` refers to the shards.
        problems: one line for everything in the model that is not loaded.
    """

    weights: dict[str, Any]
    optimizer_state: dict[str, Any] | None
    user_state: Any
    rank_state: Any
    in_place: PlannedRead | None
    problems: tuple[str, ...]


def _found_together(path: Path, step: int | None, group: ProcessGroup | None) -> Path:
    is_first = group_rank(group) == 0
    return gathered(f"find a checkpoint in {path}", lambda: folders.find(path, step) if is_first else path, group)[0]


def _stage(
    folder: Path,
    manifest: Manifest,
    model: nn.Module,
    optimizer: MegascaleOptimizer | None,
    strict: bool,
    group: ProcessGroup | None,
) -> _Staged:
    """Read the requested parts into new tensors, and plan the reads in place.

    Raises CheckpointError if it does not fit the model, StateDictError if it does not fit the optimizer.
    """
    manifest = renaming.under_live_names(manifest, model, optimizer)
    names, problems = compare_model(manifest, model)
    if problems and strict:
        raise CheckpointError(
            f"{folder} does not fit the model: {'; '.join(problems)}. Build the model as it was saved, or pass "
            "strict=False, and where shapes differ optimizer=None, to load what fits"
        )
    if optimizer is not None and not strict and "optimizer" not in manifest.trees:
        problems.append("the checkpoint holds no optimizer state")
        optimizer = None
    same_world = manifest.world_size == group_size(group)
    trees: dict[str, Tree] = {
        "user": manifest.trees.get("user"),
        "rank": manifest.rank_trees[group_rank(group)] if same_world else None,
    }
    if optimizer is not None:
        trees["optimizer"] = tree_of(manifest, "optimizer")
    destination = ReadTargets.of(manifest, model, optimizer)
    trees["model"] = model_tree(manifest, names - destination.rounded)
    templates: dict[str, Tensor] = {}
    for tree in trees.values():
        templates.update(destination.templates(tree))
    in_place = {key: template for key, template in templates.items() if template is destination.live.get(key)}
    new = {key: templates[key] for key in templates.keys() - in_place.keys()}
    PlannedRead(folder, manifest, new).read()
    remainders.decode_(folder, manifest, templates)
    nests = {part: unflatten(tree, templates) for part, tree in trees.items()}
    if optimizer is not None:
        _leave_to_optimizer(nests["model"], nests["optimizer"]["main_params"], optimizer, model)
        for live, part in optimizer._live_parts(nests["optimizer"], strict):
            live.check(part, strict=strict)
    return _Staged(
        weights={name: value for name, value in nests["model"].items() if not isinstance(value, ParamShard)},
        optimizer_state=nests.get("optimizer"),
        user_state=nests["user"],
        rank_state=nests["rank"],
        in_place=PlannedRead(folder, manifest, in_place) if in_place else None,
        problems=tuple(problems),
    )


def _leave_to_optimizer(
    weights: dict[str, Any], main_params: dict[str, Any], optimizer: MegascaleOptimizer, model: nn.Module
) -> None:
    """Of weights that were saved in another precision, leave those to the optimizer whose fp32 values are known.

    It rounds them from main params: those saved beside 16-bit weights, or weights that were saved in fp32 themselves.

    Args:
        weights: as saved, by the model's names; what the optimizer rounds is taken out.
        main_params: as saved, by the optimizer's names; fp32 weights are added.
    """
    names = {
        id(param): name
        for live in optimizer._live_states()
        for name, param in live.named_params().items()
        if param.requires_grad and live.main_params.keeps(param)
    }
    for name, param in model_state(model).items():
        saved, own = weights.get(name), names.get(id(param))
        if own is None or not isinstance(saved, Tensor) or saved.dtype == param.dtype:
            continue
        if param.dtype in HALF_DTYPES and saved.dtype in (torch.float32, torch.float64):
            main_params.setdefault(own, saved)
        if own in main_params:
            del weights[name]


def _load_in_place(
    folder: Path,
    optimizer: MegascaleOptimizer,
    state_dict: dict[str, Any],
    in_place: PlannedRead | None,
    strict: bool,
    group: ProcessGroup | None,
) -> None:
    """Fill the live shards, then load the rest into the optimizer. ``in_place``: None on a rank that has no shard."""
    try:
        with raise_on_all_ranks(f"read {folder}", group):
            if in_place is not None:
                in_place.read()
        optimizer.load_state_dict(state_dict, strict=strict)
    except MegascaleError as error:
        raise CheckpointError(
            f"{error}. This was found after the checks, so the optimizer holds a part of the checkpoint now: load "
            "again, or load an earlier checkpoint, before training goes on"
        ) from error
