"""Shows a checkpoint under the names of the model and the optimizer that load it.

Saved names that differ from the live ones by parts of wrappers alone, such as ``module.`` of DistributedDataParallel
and ``_orig_mod.`` of torch.compile, are the same parameter's; so are, in an optimizer, a name and a position:
:mod:`megascale.utils.param_names`. The manifest is renamed as it is read, so that all that reads by it knows live
names alone. No file changes.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from megascale.base_optimizer import MegascaleOptimizer
from megascale.checkpoint.contents import PARAM_NAMES, model_state
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import Form, flatten, leaves, unflatten
from megascale.errors import CheckpointError, StateDictError
from megascale.utils.param_names import by_position, renames


def under_live_names(manifest: Manifest, model: nn.Module, optimizer: MegascaleOptimizer | None) -> Manifest:
    """Return the manifest as if the checkpoint had been saved under the names that are live here.

    Args:
        optimizer: None if its state is not to be loaded.

    Raises:
        CheckpointError, StateDictError: two names of the model, or of the optimizer, cannot be told apart.
    """
    nests: dict[str, Any] = {}
    for part in ("model", "optimizer", PARAM_NAMES):
        if part in manifest.trees:
            forms = {key: Form(shape, dtype) for key, shape, dtype in leaves(manifest.trees[part])}
            nests[part] = unflatten(manifest.trees[part], forms)
    try:
        of_model = renames(nests["model"], model_state(model), "the checkpoint")
    except StateDictError as error:
        raise CheckpointError(str(error)) from None
    of_optimizer: dict[str, str] = {}
    if optimizer is not None and "optimizer" in nests:
        live = [names for one in optimizer._live_states() for names in one.names()]
        state, main_params = nests["optimizer"]["optimizer"]["state"], nests["optimizer"]["main_params"]
        groups = nests["optimizer"]["optimizer"]["param_groups"]
        saved, what = [group["params"] for group in groups], "the checkpoint's optimizer state"
        of_optimizer = by_position(saved, live, what) or renames(
            [*chain(*saved), *state, *main_params], [*chain(*live)], what
        )
        nests["optimizer"]["optimizer"]["state"] = _renamed(state, of_optimizer)
        nests["optimizer"]["main_params"] = _renamed(main_params, of_optimizer)
        for group in groups:
            group["params"] = [of_optimizer.get(name, name) for name in group["params"]]
    if not of_model and not of_optimizer:
        return manifest
    # The part that maps the model's names to the optimizer's holds those alone that differ.
    names = nests.get(PARAM_NAMES, {})
    pairs = [(of_model.get(name, name), names.get(name, name)) for name in nests["model"]]
    nests[PARAM_NAMES] = {
        name: of_optimizer.get(other, other) for name, other in pairs if name != of_optimizer.get(other, other)
    }
    nests["model"] = _renamed(nests["model"], of_model)
    trees = manifest.trees | {part: flatten(nest, part)[0] for part, nest in nests.items()}
    # Both trees of a part have its tensors in one order.
    keys = {
        before: after
        for part in ("model", "optimizer")
        if part in nests
        for (before, _, _), (after, _, _) in zip(leaves(manifest.trees[part]), leaves(trees[part]), strict=True)
    }
    files = {
        name: replace(file, pieces=[(keys.get(piece[0], piece[0]), *piece[1:]) for piece in file.pieces])
        for name, file in manifest.files.items()
    }
    return replace(manifest, trees=trees, files=files)


def _renamed(named: Mapping[str, Any], new: Mapping[str, str]) -> dict[str, Any]:
    return {new.get(name, name): value for name, value in named.items()}
