"""What goes into a checkpoint, and how what comes out is checked before anything live changes."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import Tree, flatten, leaves
from megascale.errors import ArgumentTypeError, CheckpointError
from megascale.parallel import ParallelGroups


@runtime_checkable
class SavedOptimizer(Protocol):
    """What a checkpoint needs of an optimizer. MixedPrecisionOptimizer is one; a bare torch optimizer is not."""

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Tensors and primitives, the same keys on every rank; ``copy=False`` gives the live tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load on all ranks, or raise the same error on all with nothing changed."""

    def reload_model_params(self) -> None:
        """Set the main params from the model params."""


@dataclass(frozen=True)
class Contents:
    """One rank's view of what is saved. The tensors are the live ones."""

    trees: dict[str, Tree]
    rank_tree: Tree
    tensors: dict[str, Tensor]

    def digest(self) -> dict[str, int]:
        """A checksum for each part that all ranks must agree on: names, shapes, dtypes and primitives."""
        return {part: zlib.crc32(json.dumps(tree).encode()) for part, tree in self.trees.items()}


def collect(
    model: nn.Module,
    optimizer: SavedOptimizer | None,
    user_state: Any,
    rank_state: Any,
    rank: int,
    groups: ParallelGroups,
) -> Contents:
    """Flatten everything that is saved. Raises ArgumentError or ArgumentTypeError for what a checkpoint cannot hold."""
    check_types(model, optimizer)
    _refuse_local_shards(model, groups)
    parts: dict[str, Any] = {"model": bare(model).state_dict()}
    if optimizer is not None:
        parts["optimizer"] = optimizer.state_dict(copy=False)
    if user_state is not None:
        parts["user"] = user_state
    trees: dict[str, Tree] = {}
    tensors: dict[str, Tensor] = {}
    for part, nest in parts.items():
        trees[part], found = flatten(nest, part)
        tensors.update(found)
    rank_tree, found = flatten(rank_state, f"rank/{rank}")
    tensors.update(found)
    return Contents(trees, rank_tree, tensors)


def check_types(model: nn.Module, optimizer: SavedOptimizer | None) -> None:
    """Raise ArgumentTypeError unless these are a module, and one of our optimizers or None."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, SavedOptimizer):
        raise ArgumentTypeError(
            f"optimizer must be a MixedPrecisionOptimizer or None, got {type(optimizer).__name__}; "
            "wrap a torch optimizer first"
        )


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, so that names do not depend on how many ranks train."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def compare_model(manifest: Manifest, model: nn.Module) -> tuple[set[str], list[str]]:
    """Compare the model's state dict with the one saved.

    Returns:
        The names to load, and one line for each name that is missing, unexpected, or of another shape or dtype.
    """
    live, _ = flatten(bare(model).state_dict(), "model")
    here, there = dict(live["dict"]), dict(manifest.trees["model"]["dict"])
    problems = [f"{name!r} is missing in the checkpoint" for name in here if name not in there]
    problems += [f"{name!r} is not in the model" for name in there if name not in here]
    good: set[str] = set()
    for name in here.keys() & there.keys():
        mine, saved = list(leaves(here[name])), list(leaves(there[name]))
        if mine == saved:
            good.add(name)
        else:
            problems.append(f"{name!r} is {_describe(saved)} in the checkpoint, {_describe(mine)} in the model")
    return good, sorted(problems)


def model_tree(manifest: Manifest, names: set[str]) -> Tree:
    """Return the model's saved tree with only the entries ``names``."""
    return {"dict": [[name, node] for name, node in manifest.trees["model"]["dict"] if name in names]}


def templates_of(tree: Tree, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate a tensor for every leaf of ``tree``: placed as the live DTensor of that key, else whole on the host."""
    templates: dict[str, Tensor] = {}
    for key, shape, dtype in leaves(tree):
        model = live.get(key, live.get(_main_param_key(key)))
        if isinstance(model, DTensor) and tuple(model.shape) == shape:
            templates[key] = torch.empty_like(model, dtype=dtype)
        else:
            templates[key] = torch.empty(shape, dtype=dtype)
    return templates


def tree_of(manifest: Manifest, part: str) -> Tree:
    """Return a part's tree. Raises CheckpointError if it was not saved."""
    if part not in manifest.trees:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} holds no {part} state; it has {', '.join(manifest.trees)}"
        )
    return manifest.trees[part]


def _main_param_key(key: str) -> str:
    """Return the key of the main param that an optimizer state tensor belongs to: it is placed alike."""
    parts = key.split("/")
    of_state = parts[:3] == ["optimizer", "optimizer", "state"] and len(parts) > 4
    return f"optimizer/main_params/{parts[3]}" if of_state else ""


def _describe(found: list[tuple[str, tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for _, shape, dtype in found) or "not a tensor"


def _refuse_local_shards(model: nn.Module, groups: ParallelGroups) -> None:
    """Raise CheckpointError for a parameter of which each rank holds another part without saying so."""
    if groups.tensor_parallel is None or groups.tensor_parallel.size() == 1:
        return
    for name, param in model.named_parameters():
        if getattr(param, "tensor_model_parallel", False) and not isinstance(param, DTensor):
            raise CheckpointError(
                f"parameter {name!r} is split over tensor-parallel ranks by its attribute tensor_model_parallel, and a "
                "checkpoint would keep the first rank's part only; make it a DTensor"
            )
