"""Collects the contents of a checkpoint, and checks saved contents before anything live changes."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megascale.base_optimizer import MegascaleOptimizer
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import Tree, flatten, join, leaves
from megascale.checkpoint.pieces import RANK_PART
from megascale.errors import ArgumentTypeError, CheckpointError, listed
from megascale.kernels.remainders import REMAINDER_DTYPE
from megascale.main_params.shard import ParamShard
from megascale.parallel import ParallelGroups, is_expert
from megascale.utils.collectives import group_size

MAIN_PARAMS = "optimizer/main_params"
"""The key of the main params."""
PARAM_NAMES = "param_names"
"""The part that maps the optimizer's names of parameters to the model's, where they differ."""


@dataclass(frozen=True)
class Contents:
    """One rank's view of what is saved. The tensors are the live ones.

    Attributes:
        trees: by part.
        rank_tree: of this rank's own state.
        tensors: by key.
    """

    trees: dict[str, Tree]
    rank_tree: Tree
    tensors: dict[str, Tensor]

    def digest(self) -> dict[str, int]:
        """Return a checksum of names, shapes, dtypes and primitives for each part that all ranks must agree on."""
        parts = dict(self.trees)
        for part in ("optimizer", "user"):  # their entries are few, and named one by one
            if isinstance(tree := parts.get(part), dict) and "dict" in tree:
                parts |= {join(part, key): entry for key, entry in parts.pop(part)["dict"]}
        # JSON is what the manifest holds: NaN and -0.0 are told apart there.
        return {part: zlib.crc32(json.dumps(tree).encode()) for part, tree in parts.items()}

    def replicated(self, model: nn.Module) -> dict[str, Tensor]:
        """Return tensors that every rank holds whole and with equal values.

        Parameters, main params, optimizer state and user state; not buffers, which may differ under
        DistributedDataParallel.
        """
        params = {join("model", name) for name, _ in bare(model).named_parameters(remove_duplicate=False)}
        return {
            key: tensor
            for key, tensor in self.tensors.items()
            if (key in params or key.startswith(("optimizer/", "user")))
            and not isinstance(tensor, (DTensor, ParamShard))
        }


def collect(
    model: nn.Module,
    optimizer: MegascaleOptimizer | None,
    user_state: Any,
    rank_state: Any,
    rank: int,
    groups: ParallelGroups,
) -> Contents:
    """Flatten everything to be saved. Raises ArgumentError or ArgumentTypeError for what a checkpoint cannot hold."""
    _refuse_local_shards(model, groups)
    weights = model_state(model)
    parts: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        shards = shards_of(optimizer)
        parts["model"] = {name: shards.get(id(value), value) for name, value in weights.items()}
        packed = parts["optimizer"] = optimizer._pack(copy=False, decode=False)
        names = names_in(packed, optimizer)
        of_optimizer = {name: names[id(value)] for name, value in weights.items() if id(value) in names}
        _require_weights(packed["main_params"], set(of_optimizer.values()))
        if renamed := {name: other for name, other in of_optimizer.items() if name != other}:
            parts[PARAM_NAMES] = renamed
    if user_state is not None:
        parts["user"] = user_state
    own = f"{RANK_PART}/{rank}"
    trees: dict[str, Tree] = {}
    tensors: dict[str, Tensor] = {}
    for part, nest in {**parts, own: rank_state}.items():
        trees[part], found = flatten(nest, part)
        tensors.update(found)
    rank_tree = trees.pop(own)
    return Contents(trees, rank_tree, tensors)


def check_types(model: nn.Module, optimizer: MegascaleOptimizer | None) -> str:
    """Return the optimizer's kind, of a chain those of its optimizers.

    Raises ArgumentTypeError unless it is one of ours, or None, and beside a module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, MegascaleOptimizer):
        raise ArgumentTypeError(
            f"optimizer must be an optimizer of megascale or None, got {type(optimizer).__name__}; wrap a torch "
            "optimizer first"
        )
    return "None" if optimizer is None else " + ".join(type(part).__name__ for part in optimizer._parts())


def require_one_kind(kinds: Sequence[list[str]]) -> None:
    """Raise CheckpointError where ranks pass other kinds of optimizers, whose messages would cross. On all ranks."""
    for rank, [kind] in enumerate(kinds):
        if [kind] != kinds[0]:
            raise CheckpointError(
                f"rank 0 passes {kinds[0][0]} as optimizer, rank {rank} {kind}; pass one on every rank, or on none"
            )


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, so that names do not depend on the number of ranks."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def model_state(model: nn.Module, shards: Mapping[int, ParamShard] | None = None) -> dict[str, Any]:
    """Return the model's state dict, live, with a ParamShard of this rank in place of every sharded parameter."""
    state = bare(model).state_dict(keep_vars=True)
    return {name: (shards or {}).get(id(value), value) for name, value in state.items()}


def shards_of(optimizer: MegascaleOptimizer) -> dict[int, ParamShard]:
    """Return, by id of the parameter, the part that this rank keeps of each sharded model param, live."""
    return {key: shard for live in optimizer._live_states() for key, shard in live.main_params.model_shards().items()}


def names_in(packed: Mapping[str, Any], optimizer: MegascaleOptimizer) -> dict[int, str]:
    """Return the name of every parameter in the optimizer's state dict ``packed``, by id."""
    groups = zip(optimizer.param_groups, packed["optimizer"]["param_groups"], strict=True)
    return {
        id(param): name for live, group in groups for param, name in zip(live["params"], group["params"], strict=True)
    }


def compare_model(manifest: Manifest, model: nn.Module) -> tuple[set[str], list[str]]:
    """Compare the model's state dict with the one saved.

    Returns:
        The names to load, and one line for each name that is missing, unexpected, or of another shape, or of another
        dtype than floating point where the model has that: weights of another precision are rounded.
    """
    live, _ = flatten(bare(model).state_dict(), "model")
    here, there = dict(live["dict"]), dict(manifest.trees["model"]["dict"])
    problems = [f"{name!r} is missing in the checkpoint" for name in here if name not in there]
    problems += [f"{name!r} is not in the model" for name in there if name not in here]
    good: set[str] = set()
    for name in here.keys() & there.keys():
        mine, saved = list(leaves(here[name])), list(leaves(there[name]))
        if _unrounded(mine) == _unrounded(saved):
            good.add(name)
        else:
            problems.append(f"{name!r} is {_describe(saved)} in the checkpoint, {_describe(mine)} in the model")
    return good, sorted(problems)


def _unrounded(found: list[tuple[str, tuple[int, ...], torch.dtype]]) -> list[tuple[str, tuple[int, ...], Any]]:
    """Return keys, shapes and dtypes, of which all real floating point ones are one."""
    return [(key, shape, "float" if dtype.is_floating_point else dtype) for key, shape, dtype in found]


def model_tree(manifest: Manifest, names: set[str]) -> Tree:
    """Return the model's saved tree with only the entries ``names``."""
    return {"dict": [[name, node] for name, node in manifest.trees["model"]["dict"] if name in names]}


def tree_of(manifest: Manifest, part: str) -> Tree:
    """Return a part's tree. Raises CheckpointError if it was not saved."""
    if part not in manifest.trees:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} holds no {part} state; it has {', '.join(manifest.trees)}"
        )
    return manifest.trees[part]


def _require_weights(main_params: Mapping[str, Tensor], saved: set[str]) -> None:
    """Raise CheckpointError for a remainder whose weights are not ``saved`` beside it: nothing could be made of it."""
    alone = [name for name, main in main_params.items() if main.dtype == REMAINDER_DTYPE and name not in saved]
    if alone:
        raise CheckpointError(
            f"the main params of {listed(alone)} are held as remainders of weights that the model's state_dict() does "
            "not hold; save the model that has these parameters, and let no hook replace them"
        )


def _describe(found: list[tuple[str, tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for _, shape, dtype in found) or "not a tensor"


def _refuse_local_shards(model: nn.Module, groups: ParallelGroups) -> None:
    """Raise CheckpointError for a parameter name under which ranks hold different parts or values."""
    data_parallel = group_size(groups.data_parallel)
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            continue
        if group_size(groups.tensor_of_param(param)) > 1 and getattr(param, "tensor_model_parallel", False):
            raise CheckpointError(
                f"parameter {name!r} is split over tensor-parallel ranks by its attribute tensor_model_parallel, and a "
                "checkpoint would keep the first rank's part only; make it a DTensor"
            )
        if data_parallel > 1 and is_expert(param) and group_size(groups.of_param(param).holders) < data_parallel:
            raise CheckpointError(
                f"parameter {name!r} is an expert's (allreduce=False), not the same on all ranks that save, and a "
                "checkpoint would keep the first ranks' expert only; make it a DTensor"
            )
