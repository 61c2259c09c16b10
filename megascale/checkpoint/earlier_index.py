"""The index of checkpoints of commit 9dbb0b5, whose manifests have none: torch's `.metadata`, which is a pickle.

Nothing else here reads a pickle; a checkpoint whose manifest has the index never comes here. Python's own unpickler
calls the functions that a file names, and a few bytes can demand any amount of memory. So the pickle is read as a
description: nothing is imported, called, built, hashed or compared, in time and memory linear in the file's length.
What it describes is checked, and then made into torch's classes.
"""

import dataclasses
import math
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
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

from megascale.errors import CheckpointError

METADATA_NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_LARGEST = 2**62
_PROPERTIES = {one.name for one in dataclasses.fields(TensorProperties)}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def read_metadata(folder: Path) -> Metadata:
    """Return which file of a checkpoint holds which piece of which tensor, as `.metadata` says.

    Raises CheckpointError for a file that is damaged or has unexpected content.
    """
    path = folder / METADATA_NAME
    data = path.read_bytes()
    try:
        return _metadata(_described(data), len(data))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; load an earlier checkpoint") from error


# What a pickle describes


@dataclass(eq=False, slots=True)
class _Named:
    """A class or function that the pickle names, ``module.name``."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class _Record:
    """An object that the pickle describes: the callable, its arguments, and the state to set."""

    kind: _Named
    arguments: Any
    state: Any = None


@dataclass(eq=False, slots=True)
class _Pairs:
    """A dict, as pairs: its keys may be records."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": _Pairs}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NUMBERS_AND_TEXTS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}


def _described(data: bytes) -> Any:
    """Return the content of a pickle of protocol 2 to 5: primitives, lists, tuples, _Pairs, _Named and _Records.

    Raises CheckpointError for one that is damaged or has an instruction that no data needs.
    """
    stack = _Stack()
    try:
        for instruction, argument, _ in pickletools.genops(data):
            if instruction.name == "STOP":
                return stack.values.pop()
            stack.run(instruction.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the pickle is damaged ({type(error).__name__}: {error})") from error
    raise CheckpointError("the pickle is cut off")


class _Stack:
    """The stack of a pickle's instructions, see :mod:`pickletools`, which reads their arguments."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Carry out one instruction."""
        push = self.values.append
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(len(self.values))
            case "POP":
                self.values.pop()
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self.values[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = self.values[-1]
            case "BINGET" | "LONG_BINGET":
                push(self._memo[argument])
            case "TUPLE":
                push(tuple(self._from_mark()))
            case "APPEND" | "APPENDS":
                items = self._last(1) if name == "APPEND" else self._from_mark()
                self._top(list).extend(items)
            case "SETITEM" | "SETITEMS":
                flat = self._last(2) if name == "SETITEM" else self._from_mark()
                self._top(_Pairs).items.extend(zip(flat[::2], flat[1::2], strict=True))
            case "GLOBAL":
                push(_Named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                push(_Named(*(_checked(part, str) for part in self._last(2))))
            case "REDUCE" | "NEWOBJ":
                kind, arguments = self._last(2)
                push(_Record(_checked(kind, _Named), arguments))
            case "BUILD":
                [state] = self._last(1)
                self._top(_Record).state = state
            case _ if name in _NUMBERS_AND_TEXTS:
                push(argument)
            case _ if name in _CONSTANTS:
                push(_CONSTANTS[name])
            case _ if name in _EMPTY:
                push(_EMPTY[name]())
            case _ if name in _TUPLES:
                push(tuple(self._last(_TUPLES[name])))
            case _:
                raise CheckpointError(f"the pickle is damaged, or more than data: {name} has no place there")

    def _last(self, count: int) -> list[Any]:
        return [self.values.pop() for _ in range(count)][::-1]

    def _from_mark(self) -> list[Any]:
        start = self._marks.pop()
        found = self.values[start:]
        del self.values[start:]
        return found

    def _top(self, kind: type) -> Any:
        return _checked(self.values[-1], kind)


# What torch's index says


def _metadata(record: Any, length: int) -> Metadata:
    """Return the parts that a load needs. ``length``: of the file, which bounds the sizes in the result."""
    fields = _fields(record, _MODULE, "Metadata")
    described = {
        _checked(key, str): _fields(value, _MODULE, "TensorStorageMetadata")
        for key, value in _pairs(fields.get("state_dict_metadata"))
    }
    if sum(len(_checked(one.get("chunks"), list)) for one in described.values()) > length:
        raise CheckpointError("it lists more pieces than it has bytes")
    stored: dict[str, Any] = {}
    for name, one in described.items():
        size = _size(one.get("size"))
        chunks = [_chunk(name, chunk, size) for chunk in one["chunks"]]
        stored[name] = TensorStorageMetadata(_properties(one.get("properties"), size), size, chunks)
    places = {_index(key): _storage_info(value) for key, value in _pairs(fields.get("storage_data"))}
    return Metadata(stored, storage_data=places)


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
    if not isinstance(record, _Named) or record.module != "torch" or record.name not in _DTYPES:
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
    is_size = isinstance(record, _Record) and (record.kind.module, record.kind.name) == ("torch", "Size")
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
    return {_checked(key, str): value for key, value in _pairs(_Pairs() if state is None else state)}


def _state(record: Any, module: str, name: str) -> Any:
    if not isinstance(record, _Record) or (record.kind.module, record.kind.name) != (module, name):
        found = f"{record.kind.module}.{record.kind.name}" if isinstance(record, _Record) else type(record).__name__
        raise CheckpointError(f"it has {found[:200]} in the place of {name}")
    return record.state


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(_checked(value, _Pairs).items)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"it has a {type(value).__name__} in the place of a {kind.__name__}")
    return value
