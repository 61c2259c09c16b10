"""Reads a pickle as a description of its content: nothing is imported, called, built, hashed or compared.

Python's own unpickler calls the functions that a file names, and a few bytes can demand any amount of memory. This one
supports only instructions that describe plain data and objects. Its time and memory are linear in the file's length.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megascale.errors import CheckpointError


@dataclass(eq=False, slots=True)
class Named:
    """A class or function that the pickle names, ``module.name``."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Record:
    """An object that the pickle describes: the callable, its arguments, and the state to set."""

    kind: Named
    arguments: Any
    state: Any = None


@dataclass(eq=False, slots=True)
class Pairs:
    """A dict, as pairs: its keys may be records."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


def describe(data: bytes) -> Any:
    """Return the content of a pickle of protocol 2 to 5: primitives, lists, tuples, Pairs, Named and Records.

    Raises CheckpointError for one that is damaged or has an unsupported instruction.
    """
    try:
        return _Machine(data).run()
    except (IndexError, struct.error, UnicodeDecodeError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the pickle is damaged ({type(error).__name__}: {error})") from error


class _Machine:
    """The stack machine that interprets a pickle; see :mod:`pickletools`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            code = self._data[self._at : self._at + 1]
            self._at += 1
            if code == b".":
                return self._stack.pop()
            do = _INSTRUCTIONS.get(code)
            if do is None:
                raise CheckpointError(
                    f"the pickle is damaged, or more than data: instruction {code!r} has no place there"
                )
            do(self)

    def bytes(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) != count:
            raise CheckpointError("the pickle is cut off")
        self._at += count
        return found

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.bytes(struct.calcsize(layout)))[0]

    def line(self) -> str:
        end = self._data.index(b"\n", self._at)
        found = self._data[self._at : end].decode()
        self._at = end + 1
        return found

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def to_mark(self) -> list[Any]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def last(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise CheckpointError("the pickle is damaged: it pops more values than its stack has")
        found = self._stack[-count:]
        del self._stack[-count:]
        return found

    def get(self, place: int) -> None:
        if place not in self._memo:
            raise CheckpointError("the pickle is damaged: it reads a memo entry that it has not written")
        self.push(self._memo[place])

    def put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise CheckpointError("the pickle is damaged: it appends to something that is not a list")
        target.extend(values)

    def set_items(self, flat: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, Pairs):
            raise CheckpointError("the pickle is damaged: it sets items of something that is not a dict")
        target.items.extend(zip(flat[::2], flat[1::2], strict=True))

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise CheckpointError("the pickle is damaged: a class has no name")
        self.push(Named(module, name))

    def make(self) -> None:
        kind, arguments = self.last(2)
        if not isinstance(kind, Named):
            raise CheckpointError(
                "the pickle calls something that is not a named class or function: it is more than data"
            )
        self.push(Record(kind, arguments))

    def build(self) -> None:
        [state] = self.last(1)
        record = self._stack[-1]
        if not isinstance(record, Record):
            raise CheckpointError("the pickle sets the state of something that is not an object: it is more than data")
        record.state = state


def _text(layout: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine.bytes(machine.number(layout)).decode("utf-8", "surrogatepass"))


def _binary(layout: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine.bytes(machine.number(layout)))


def _tuple(count: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(tuple(machine.last(count)))


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda machine: machine.bytes(1),  # PROTO
    b"\x95": lambda machine: machine.bytes(8),  # FRAME
    b"(": _Machine.mark,
    b"0": lambda machine: machine.last(1),  # POP
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"J": lambda machine: machine.push(machine.number("<i")),
    b"K": lambda machine: machine.push(machine.number("<B")),
    b"M": lambda machine: machine.push(machine.number("<H")),
    b"\x8a": lambda machine: machine.push(int.from_bytes(machine.bytes(machine.number("<B")), "little", signed=True)),
    b"G": lambda machine: machine.push(machine.number(">d")),
    b"X": _text("<I"),
    b"\x8c": _text("<B"),
    b"\x8d": _text("<Q"),
    b"B": _binary("<I"),
    b"C": _binary("<B"),
    b"\x8e": _binary("<Q"),
    b"]": lambda machine: machine.push([]),
    b"a": lambda machine: machine.append(machine.last(1)),
    b"e": lambda machine: machine.append(machine.to_mark()),
    b")": lambda machine: machine.push(()),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"t": lambda machine: machine.push(tuple(machine.to_mark())),
    b"}": lambda machine: machine.push(Pairs()),
    b"s": lambda machine: machine.set_items(machine.last(2)),
    b"u": lambda machine: machine.set_items(machine.to_mark()),
    b"h": lambda machine: machine.get(machine.number("<B")),
    b"j": lambda machine: machine.get(machine.number("<I")),
    b"q": lambda machine: machine.put(machine.number("<B")),
    b"r": lambda machine: machine.put(machine.number("<I")),
    b"\x94": lambda machine: machine.put(len(machine._memo)),  # MEMOIZE
    b"c": lambda machine: machine.name(machine.line(), machine.line()),
    b"\x93": lambda machine: machine.name(*machine.last(2)),  # STACK_GLOBAL
    b"R": _Machine.make,  # REDUCE
    b"\x81": _Machine.make,  # NEWOBJ
    b"b": _Machine.build,
}
