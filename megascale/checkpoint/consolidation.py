"""Writes a checkpoint of any number of ranks as one file that ``torch.load(weights_only=True)`` reads."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.checkpoint import directory as folders
from megascale.checkpoint import remainders
from megascale.checkpoint.agreement import named
from megascale.checkpoint.contents import MAIN_PARAMS, PARAM_NAMES, tree_of
from megascale.checkpoint.files import PlannedRead
from megascale.checkpoint.manifest import Manifest
from megascale.checkpoint.nest import Tree, join, leaves, unflatten
from megascale.checkpoint.read_targets import ReadTargets
from megascale.errors import ArgumentTypeError, CheckpointError
from megascale.utils import validate
from megascale.utils.atomic_files import atomic_write


def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    optimizer: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the model's weights, or the whole training state, of a checkpoint into the file ``out``; returns its path.

    Runs in one process, on the host, without torch.distributed. ``out`` appears when it is complete. Needs memory for
    ``out`` and one more saved tensor.

    Args:
        path: a directory of checkpoints (the latest is taken, or the one of ``step``), or one checkpoint's folder.
        out: a file for ``torch.save``, commonly `.pt`; its folder must exist.
        step: which checkpoint.
        dtype: of all floating point weights, rounded once, from main params where there are any: ``torch.float32``
            gives the main params themselves. None: the model's own bits.
        optimizer: False: the file is the model's state dict. True: ``{"model": ..., "optimizer": ..., "step": n}``;
            every optimizer of megascale can load that "optimizer".
        overwrite: replace ``out`` if it exists.

    Raises:
        CheckpointError: no checkpoint there, a file is missing or damaged, ``out`` exists or cannot be written.
        ArgumentTypeError: an argument of another type.
    """
    validate.flag("optimizer", optimizer)
    validate.flag("overwrite", overwrite)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentTypeError(f"dtype must be a floating point torch.dtype or None, got {dtype!r}")
    if step is not None:
        validate.integer("step", step, minimum=0)
    target = Path(out)
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target} exists already; choose another file, or pass overwrite=True")
    with named(f"consolidate {path}"):
        folder = folders.find(Path(path), step)
        manifest = Manifest.read(folder)
        manifest.verify(folder)
        content = _weights(folder, manifest, dtype)
        if optimizer:
            state = _read_nest(folder, manifest, tree_of(manifest, "optimizer"))
            content = {"model": content, "optimizer": state, "step": manifest.step}
        with atomic_write(target, overwrite=overwrite) as unnamed:
            torch.save(content, unnamed)
    return target


def _weights(folder: Path, manifest: Manifest, dtype: torch.dtype | None) -> dict[str, Any]:
    tree = manifest.trees["model"]
    if dtype is None:
        weights: dict[str, Any] = _read_nest(folder, manifest, tree)
        return weights
    names = unflatten(manifest.trees.get(PARAM_NAMES, {"dict": []}), {})
    mains = {key: saved for key, _, saved in leaves(manifest.trees.get("optimizer"))}
    tensors: dict[str, Tensor] = {}
    for name, node in tree["dict"]:
        main = join(MAIN_PARAMS, names.get(name, name))
        for key, shape, saved in leaves(node):
            source, stored = (main, mains[main]) if main in mains else (key, saved)
            read = {source: torch.empty(shape, dtype=stored, device="cpu")}
            PlannedRead(folder, manifest, read).read()
            remainders.decode_(folder, manifest, read)
            value = read[source]
            tensors[key] = value.to(dtype) if value.is_floating_point() else value
    converted: dict[str, Any] = unflatten(tree, tensors)
    return converted


def _read_nest(folder: Path, manifest: Manifest, tree: Tree) -> Any:
    templates = ReadTargets().templates(tree)
    PlannedRead(folder, manifest, templates).read()
    remainders.decode_(folder, manifest, templates)
    return unflatten(tree, templates)
