"""Reads `.metadata`, torch's index of which file holds which piece of which tensor, as inert data.

torch.distributed.checkpoint writes it as a pickle of its own classes. It is read without unpickling, checked against
the expected structure, and then converted to torch's classes.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megascale.checkpoint.inert_pickle import Named, Pairs, Record, describe
from megascale.errors import CheckpointError

METADATA_NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_LARGEST = 2**62
_PROPERTIES = {field.name for field in dataclasses.fields(TensorProperties)}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def read_metadata(folder: Path) -> Metadata:
    """Return the parts of the metadata that a load needs.

    Raises CheckpointError for a file that is damaged or has unexpected content.
    """
    path = folder / METADATA_NAME
    data = path.read_bytes()
    try:
        return _Reader(len(data)).metadata(describe(data))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; load an earlier checkpoint") from error


class _Reader:
    """Converts records to torch's classes. ``length``: of the file, which bounds the sizes in the result."""

    def __init__(self, length: int) -> None:
        self._pieces_left = length

    def metadata(self, record: Any) -> Metadata:
        fields = _fields(record, _MODULE, "Metadata")
        stored = {
            _checked(key, str): self._stored(_checked(key, str), value)
            for key, value in _pairs(fields.get("state_dict_metadata"))
        }
        places = {_index(key): _storage_info(value) for key, value in _pairs(fields.get("storage_data"))}
        return Metadata(stored, storage_data=places)

    def _stored(self, name: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if isinstance(record, Record) and record.kind.name == "BytesStorageMetadata":
            _fields(record, _MODULE, "BytesStorageMetadata")
            return BytesStorageMetadata()
        fields = _fields(record, _MODULE, "TensorStorageMetadata")
        size = _size(fields.get("size"))
        chunks = _checked(fields.get("chunks"), list)
        self._pieces_left -= len(chunks)
        if self._pieces_left < 0:
            raise CheckpointError("it lists more pieces than it has bytes")
        pieces = [_chunk(name, chunk, size) for chunk in chunks]
        return TensorStorageMetadata(_properties(fields.get("properties"), size), size, pieces)


def _chunk(name: str, record: Any, size: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(record, _MODULE, "ChunkStorageMetadata")
    offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
    fits = len(offsets) == len(sizes) == len(size)
    if not fits or any(start + count > whole for start, count, whole in zip(offsets, sizes, size, strict=True)):
        raise CheckpointError(f"a piece of {name!r} does not lie in a tensor of shape {tuple(size)}")
    return ChunkStorageMetadata(offsets, sizes)


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, _MODULE, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _checked(fields.get("fqn"), str),
        None if offset is None else _size(offset),
        None if index is None else _count(index),
    )


def _storage_info(record: Any) -> _StorageInfo:
    fields = _fields(record, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
    name = _checked(fields.get("relative_path"), str)
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise CheckpointError(f"a piece lies in {name!r}, outside the checkpoint")
    if fields.get("transform_descriptors") is not None:
        raise CheckpointError(f"{name!r} is transformed, which megascale does not write")
    return _StorageInfo(name, _count(fields.get("offset")), _count(fields.get("length")))


def _properties(record: Any, size: torch.Size) -> TensorProperties:
    """Return the dtype and, where this torch asks for them, the strides of a tensor of shape ``size``.

    The state of a TensorProperties is a tuple. Its first element is the dtype. torch 2.15 added a sixth, the strides;
    what lies between is deprecated.
    """
    state = _state(record, _MODULE, "TensorProperties")
    if not isinstance(state, tuple):
        raise CheckpointError("a tensor has no properties")
    strides = _strides(state[5] if len(state) > 5 else None, size)
    known: dict[str, Any] = {"strides": strides} if "strides" in _PROPERTIES else {}
    return TensorProperties(dtype=_dtype(state[0] if state else None), **known)


def _dtype(record: Any) -> torch.dtype:
    if not isinstance(record, Named) or record.module != "torch" or record.name not in _DTYPES:
        raise CheckpointError("a tensor has no dtype that torch knows")
    return _DTYPES[record.name]


def _strides(record: Any, size: torch.Size) -> tuple[int, ...] | None:
    if record is None:
        return None
    if len(_checked(record, tuple)) != len(size):
        raise CheckpointError(f"a tensor of shape {tuple(size)} has {len(record)} strides")
    return tuple(_count(stride) for stride in record)


def _size(record: Any) -> torch.Size:
    """Return a torch.Size, which is pickled as a call with one tuple."""
    is_size = isinstance(record, Record) and (record.kind.module, record.kind.name) == ("torch", "Size")
    if not is_size or not isinstance(record.arguments, tuple) or len(record.arguments) != 1:
        raise CheckpointError("a shape is none")
    lengths = [_count(length) for length in _checked(record.arguments[0], tuple)]
    if math.prod(lengths) > _LARGEST:
        raise CheckpointError("a shape has more elements than there are addresses")
    return torch.Size(lengths)


def _count(value: Any) -> int:
    if not 0 <= _checked(value, int) <= _LARGEST:
        raise CheckpointError(f"a length or place is {value}")
    return int(value)


def _fields(record: Any, module: str, name: str) -> dict[str, Any]:
    """Return the attributes of a record of ``module.name``."""
    state = _state(record, module, name)
    return {_checked(key, str): value for key, value in _pairs(Pairs() if state is None else state)}


def _state(record: Any, module: str, name: str) -> Any:
    if not isinstance(record, Record) or (record.kind.module, record.kind.name) != (module, name):
        found = f"{record.kind.module}.{record.kind.name}" if isinstance(record, Record) else type(record).__name__
        raise CheckpointError(f"it has {found[:200]} in the place of {name}")
    return record.state


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise CheckpointError("it has something else in the place of a dict")
    return iter(value.items)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"it has a {type(value).__name__} in the place of a {kind.__name__}")
    return value
