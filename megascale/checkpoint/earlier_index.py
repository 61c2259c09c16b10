"""The index of checkpoints of commit 9dbb0b5, whose manifests have none: torch's `.metadata`, which is a pickle.

Nothing else here reads a pickle; a checkpoint whose manifest has the index never comes here. Python's own unpickler
calls the functions that a file names, and a few bytes can demand any amount of memory. So the pickle is read as a
description: nothing is imported, called, built, hashed or compared, in time and memory linear in the file's length.
Shapes and dtypes are not taken from it, as the manifest has them.
"""

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megascale.checkpoint.manifest import Index
from megascale.errors import CheckpointError

METADATA_NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_MOST = 64  # dimensions of a tensor of torch
T = TypeVar("T", list[Any], tuple[Any, ...])


def read_earlier_index(folder: Path) -> Index:
    """Return what `.metadata` says, in the form of a manifest's index.

    Raises CheckpointError for a file that is damaged or has unexpected content.
    """
    path = folder / METADATA_NAME
    data = path.read_bytes()
    try:
        return _index(_described(data), len(data))
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


def _index(record: Any, length: int) -> Index:
    """Return the index. ``length``: of the file, which bounds the number of pieces."""
    fields = _fields(record, _MODULE, "Metadata")
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for key, stored in _pairs(fields.get("state_dict_metadata")):
        chunks = _checked(_fields(stored, _MODULE, "TensorStorageMetadata").get("chunks"), list)
        length -= len(chunks)
        if length < 0:
            raise CheckpointError("it lists more pieces than it has bytes")
        for chunk in chunks:
            box = _fields(chunk, _MODULE, "ChunkStorageMetadata")
            sizes[_checked(key, str), _size(box.get("offsets"))] = _size(box.get("sizes"))
    files: dict[str, list[tuple[Any, ...]]] = {}
    for index, place in _pairs(fields.get("storage_data")):
        piece = _fields(index, _MODULE, "MetadataIndex")
        info = _fields(place, "torch.distributed.checkpoint.filesystem", "_StorageInfo")
        key, offsets = _checked(piece.get("fqn"), str), _size(piece.get("offset"))
        if (key, offsets) not in sizes:
            raise CheckpointError(f"it places a piece of {key!r} that no tensor has")
        if info.get("transform_descriptors") is not None:
            raise CheckpointError(f"a piece of {key!r} is transformed, which megascale does not write")
        start_and_length = (_checked(info.get(name), int) for name in ("offset", "length"))
        name = _checked(info.get("relative_path"), str)
        files.setdefault(name, []).append((key, *start_and_length, offsets, sizes[key, offsets]))
    return files


def _size(record: Any) -> tuple[int, ...]:
    """Return a torch.Size, which is pickled as a call with one tuple."""
    is_size = isinstance(record, _Record) and (record.kind.module, record.kind.name) == ("torch", "Size")
    if not is_size or not isinstance(record.arguments, tuple) or len(record.arguments) != 1:
        raise CheckpointError("a shape is none")
    return tuple(_checked(length, int) for length in _few(_checked(record.arguments[0], tuple)))


def _fields(record: Any, module: str, name: str) -> dict[str, Any]:
    """Return the attributes of a record of ``module.name``."""
    if not isinstance(record, _Record) or (record.kind.module, record.kind.name) != (module, name):
        found = f"{record.kind.module}.{record.kind.name}" if isinstance(record, _Record) else type(record).__name__
        raise CheckpointError(f"it has {found[:200]} in the place of {name}")
    pairs = [] if record.state is None else _few(_checked(record.state, _Pairs).items)
    return {_checked(key, str): value for key, value in pairs}


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(_checked(value, _Pairs).items)


def _few(values: T) -> T:
    """Return the fields of an object or the lengths of a shape: a few, however often the pickle refers to them."""
    if len(values) > _MOST:
        raise CheckpointError(f"an object has {len(values)} fields or dimensions")
    return values


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"it has a {type(value).__name__} in the place of a {kind.__name__.lstrip('_')}")
    return value
