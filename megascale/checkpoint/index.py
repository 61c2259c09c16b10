"""The index of a checkpoint, in its manifest: which bytes of which file hold which piece of which tensor.

``{file: [[key, start, length], [key, start, length, offsets, sizes], ...]}``: an archive of ``length`` bytes from
``start`` on holds the whole tensor of that key, or the box of ``sizes`` at ``offsets`` in it. The tensors' shapes and
dtypes are in the manifest's trees. Shapes, lengths and places are counted in elements and bytes.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megascale.checkpoint.earlier_index import read_earlier_index
from megascale.checkpoint.manifest import Index, Manifest
from megascale.checkpoint.nest import leaves
from megascale.errors import CheckpointError


def index_of(metadata: Metadata, places: Iterable[WriteResult]) -> Index:
    """Return the index of the tensors that ``metadata`` describes, whose pieces lie in ``places``."""
    sizes: dict[tuple[str, torch.Size], torch.Size] = {}
    whole: dict[str, torch.Size] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            whole[key] = stored.size
            sizes.update({(key, chunk.offsets): chunk.sizes for chunk in stored.chunks})
    files: dict[str, list[tuple[Any, ...]]] = {}
    for place in places:
        key, offsets, info = place.index.fqn, place.index.offset, place.storage_data
        if offsets is None:
            raise CheckpointError(f"torch plans a piece of {key!r} without its place in the tensor")
        size = sizes[key, offsets]
        box = () if size == whole[key] else (tuple(offsets), tuple(size))
        files.setdefault(info.relative_path, []).append((key, info.offset, info.length, *box))
    return {name: tuple(pieces) for name, pieces in files.items()}


def read_index(folder: Path, manifest: Manifest) -> Metadata:
    """Return the index of a checkpoint as torch's planner takes it. Opens no pickle if the manifest has it.

    Raises CheckpointError for an index that does not fit the manifest's tensors or files.
    """
    index = read_earlier_index(folder) if manifest.index is None else manifest.index
    try:
        return _metadata(manifest, index)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the index of {folder} is damaged ({type(error).__name__}: {error}); load an earlier checkpoint"
        ) from error


def _metadata(manifest: Manifest, index: Index) -> Metadata:
    forms = {
        key: (torch.Size(shape), dtype)
        for tree in (*manifest.trees.values(), *manifest.rank_trees)
        for key, shape, dtype in leaves(tree)
    }
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, pieces in index.items():
        if name not in manifest.files or Path(name).name != name:
            raise ValueError(f"{name!r} is outside the checkpoint, or not one of its files")
        for key, start, length, *box in pieces:
            shape, dtype = forms[key]
            offsets, sizes = map(torch.Size, box or ((0,) * len(shape), shape))
            ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
            if min((*offsets, *sizes, start), default=0) < 0 or any(
                end > whole for end, whole in zip(ends, shape, strict=True)
            ):
                raise ValueError(f"a piece of {key!r} does not lie in a tensor of shape {tuple(shape)}")
            if math.prod(sizes) * dtype.itemsize > length or start + length > manifest.files[name].size:
                raise ValueError(f"{name!r} has not as many bytes as a piece of {key!r}")
            if key not in stored:
                stored[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [])
            stored[key].chunks.append(ChunkStorageMetadata(offsets, sizes))
            places[MetadataIndex(key, offsets)] = _StorageInfo(name, start, length)
    return Metadata(stored, storage_data=places)
