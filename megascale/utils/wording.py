"""Words for numbers that messages and ``repr()`` show. Nothing here waits for a device."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def size(nbytes: int) -> str:
    """Return a number of bytes with its unit, such as ``1.25 GB``."""
    unit, step = next(((unit, step) for unit, step in _UNITS if nbytes >= step), ("bytes", 1))
    return f"{nbytes / step:.3g} {unit}" if step > 1 else f"{nbytes} {unit}"


def count(number: int, what: str) -> str:
    """Return a number and what it counts, such as ``1 rank`` and ``2 ranks``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def either(names: Sequence[str]) -> str:
    """Return names as a choice: ``a, b or c``."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def call(name: str, *values: Any, **fields: Any) -> str:
    """Return ``name(value, field=value)``."""
    return f"{name}({', '.join([*map(repr, values), *(f'{key}={value!r}' for key, value in fields.items())])})"


class Unread(str):
    """What ``repr()`` shows, as it is, of a number that lies on a device: reading it would wait."""

    __repr__ = str.__str__


def number(value: Tensor, known: str) -> Any:
    """Return a one-element tensor's number if it lies in host memory, else :class:`Unread`.

    ``known``: what the host knows of it, in words.
    """
    return value.reshape(-1).tolist()[0] if value.device.type == "cpu" else Unread(f"<on {value.device}, {known}>")
