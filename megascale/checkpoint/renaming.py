"""Shows a checkpoint under the names of the model and the optimizer that load it.

Saved names that differ from the live ones by parts of wrappers alone, such as ``module.`` of DistributedDataParallel
and ``_orig_mod.`` of torch.compile, are the same parameter's; so are, in an optimizer, a name and a position:
:mod:`megascale.utils.param_names`. The manifest is renamed as it is read, so that all that reads by it knows live
names alone. No file changes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from megascale.checkpoint.contents import PARAM_NAMES, SavedOptimizer, model_state
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import Tree, join, unflatten
from megascale.errors import CheckpointError, StateDictError
from megascale.utils.param_names import by_position, renames

_BY_NAME = (("optimizer", "state"), ("main_params",))
"""Places in the optimizer's part of dicts that are keyed by the names of parameters."""


def under_live_names(manifest: Manifest, model: nn.Module, optimizer: SavedOptimizer | None) -> Manifest:
    """Return the manifest as if the checkpoint had been saved under the names that are live here.

    Args:
        optimizer: None if its state is not to be loaded.

    Raises:
        CheckpointError, StateDictError: two names of the model, or of the optimizer, cannot be told apart.
    """
    try:
        of_model = renames(_names(manifest.trees["model"]), model_state(model), "the checkpoint")
    except StateDictError as error:
        raise CheckpointError(str(error)) from None
    of_optimizer: dict[str, str] = {}
    if optimizer is not None and "optimizer" in manifest.trees:
        lives = optimizer.live_states()
        live = [names for one in lives for names in one.names()]
        saved, what = _names_by_group(manifest), "the checkpoint's optimizer state"
        of_optimizer = by_position(saved, live, what) or renames(_optimizer_names(manifest), [*chain(*live)], what)
    if not of_model and not of_optimizer:
        return manifest
    keys: dict[str, str] = {}
    trees = dict(manifest.trees)
    trees["model"] = _renamed_keys(trees["model"], of_model, "model", keys)
    if of_optimizer:
        trees["optimizer"] = _renamed_optimizer(trees["optimizer"], of_optimizer, keys)
    trees[PARAM_NAMES] = _renamed_names(manifest, of_model, of_optimizer)
    files = {
        name: replace(file, pieces=[(keys.get(piece[0], piece[0]), *piece[1:]) for piece in file.pieces])
        for name, file in manifest.files.items()
    }
    return replace(manifest, trees=trees, files=files)


def _names(tree: Tree) -> list[Any]:
    return [name for name, _ in tree["dict"]]


def _at(tree: Tree, path: Iterable[str]) -> Tree:
    for key in path:
        tree = dict(tree["dict"])[key]
    return tree


def _names_by_group(manifest: Manifest) -> list[list[str]]:
    groups = unflatten(_without_tensors(_at(manifest.trees["optimizer"], ("optimizer", "param_groups"))), {})
    return [group["params"] for group in groups]


def _optimizer_names(manifest: Manifest) -> list[str]:
    tree = manifest.trees["optimizer"]
    return [*chain(*_names_by_group(manifest)), *(name for path in _BY_NAME for name in _names(_at(tree, path)))]


def _without_tensors(tree: Tree) -> Tree:
    """Return the tree of param groups with their names alone: an option may be a tensor."""
    return {"list": [{"dict": [pair for pair in group["dict"] if pair[0] == "params"]} for group in tree["list"]]}


def _renamed_optimizer(tree: Tree, new: Mapping[str, str], keys: dict[str, str]) -> Tree:
    for path in _BY_NAME:
        prefix = "/".join(("optimizer", *path))
        tree = _replaced(tree, path, partial(_renamed_keys, new=new, prefix=prefix, keys=keys))
    return _replaced(tree, ("optimizer", "param_groups"), partial(_renamed_groups, new=new))


def _replaced(tree: Tree, path: tuple[str, ...], change: Callable[[Tree], Tree]) -> Tree:
    """Return ``tree`` with what is at ``path`` changed."""
    if not path:
        return change(tree)
    return {
        "dict": [[key, _replaced(node, path[1:], change) if key == path[0] else node] for key, node in tree["dict"]]
    }


def _renamed_keys(tree: Tree, new: Mapping[str, str], prefix: str, keys: dict[str, str]) -> Tree:
    """Return a dict's tree with renamed keys, at ``prefix`` in the checkpoint. Adds the new key of each tensor."""
    pairs = []
    for name, node in tree["dict"]:
        if name in new:
            node = _moved(node, join(prefix, name), join(prefix, new[name]), keys)
        pairs.append([new.get(name, name), node])
    return {"dict": pairs}


def _moved(node: Tree, old: str, new: str, keys: dict[str, str]) -> Tree:
    """Return a node with each tensor's key beginning with ``new`` in place of ``old``."""
    if not isinstance(node, dict):
        return node
    [(kind, content)] = node.items()
    match kind:
        case "tensor":
            key = new + content["key"].removeprefix(old)
            keys[content["key"]] = key
            return {"tensor": {**content, "key": key}}
        case "dict":
            return {"dict": [[key, _moved(item, old, new, keys)] for key, item in content]}
        case "list" | "tuple":
            return {kind: [_moved(item, old, new, keys) for item in content]}
    return node


def _renamed_groups(tree: Tree, new: Mapping[str, str]) -> Tree:
    """Return the tree of the param groups; ``params`` of each is a list of names."""
    groups = []
    for group in tree["list"]:
        pairs = [
            [key, {"list": [new.get(name, name) for name in node["list"]]} if key == "params" else node]
            for key, node in group["dict"]
        ]
        groups.append({"dict": pairs})
    return {"list": groups}


def _renamed_names(manifest: Manifest, of_model: Mapping[str, str], of_optimizer: Mapping[str, str]) -> Tree:
    """Return the tree of the part that maps the model's names to the optimizer's, where they differ."""
    saved = dict(unflatten(manifest.trees.get(PARAM_NAMES, {"dict": []}), {}))
    pairs = []
    for name in _names(manifest.trees["model"]):
        own = saved.get(name, name)
        pairs.append([of_model.get(name, name), of_optimizer.get(own, own)])
    return {"dict": [pair for pair in pairs if pair[0] != pair[1]]}
