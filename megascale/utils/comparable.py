"""One form for equal values of any type, whose ``repr`` says the value: what ranks compare of options.

Compared by value are numbers, words, None, bytes, dtypes, enums, and what holds such: sequences, mappings, sets,
dataclasses, arrays, and tensors in host memory. A device is compared by its type, as each rank has one of its own;
functions and classes by their names, functions by their code, too; tensors on a device by where they are, as the host
must not wait. What a function has closed over, and objects of other classes, cannot be compared: they may hold what is
a rank's own, such as a process group. Of these objects only the class is.
"""

import enum
import functools
import numbers
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from decimal import Decimal
from hashlib import blake2b
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BY_REPR = (complex, bytes, bytearray, range, slice, Decimal, torch.dtype, torch.layout, torch.memory_format)
_LARGEST_SHOWN = 8
"""Elements of an array that a message can show; of more there is a digest."""


def comparable(value: Any) -> Any:
    """Return ``value`` in the form that equal ones share: a number, a word, None, or a tuple or dict of such."""
    if value is None:
        return None
    if isinstance(value, str):
        return str.__str__(value)  # of a str that is an enum
    if isinstance(value, numbers.Real):
        try:
            return float(value) + 0.0  # -0.0 becomes 0.0
        except OverflowError:  # an integer that is too large
            return repr(value)
    if isinstance(value, tuple | list):
        return tuple(map(comparable, value))
    if isinstance(value, Tensor):
        return _of_tensor(value) if value.numel() != 1 or value.is_complex() else number_in(value)
    if isinstance(value, np.ndarray | np.generic):
        return _of_array(np.asarray(value))
    if isinstance(value, Mapping):
        return _of_items(value)
    if isinstance(value, Set):
        return tuple(sorted(repr(comparable(one)) for one in value))
    return _of_object(value)


def number_in(value: Tensor) -> float | str:
    """Return the number that a tensor holds in host memory; else where it is, as the host must not wait."""
    if value.device.type == "cpu" and value.numel() == 1:
        try:
            return float(value.detach().double().numpy().reshape(()))
        except (RuntimeError, TypeError):  # a tensor without memory of its own, such as a fake one
            pass
    return f"a tensor on {value.device.type}"


def _of_tensor(value: Tensor) -> Any:
    if value.device.type == "cpu":
        try:
            dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
            return _of_array(dense.to(torch.complex128 if value.is_complex() else torch.float64).numpy())
        except (RuntimeError, TypeError):  # as above
            pass
    return f"a tensor of shape {tuple(value.shape)} on {value.device.type}"


def _of_array(value: np.ndarray[Any, Any]) -> Any:
    if value.size <= _LARGEST_SHOWN or value.dtype.hasobject:
        return comparable(value.tolist())
    kind = "complex128" if value.dtype.kind == "c" else "float64" if value.dtype.kind in "biuf" else value.dtype
    digest = blake2b(value.astype(kind).tobytes(), digest_size=8).hexdigest()
    return f"values of shape {value.shape} and digest {digest}"


def _of_items(value: Mapping[Any, Any]) -> dict[str, Any]:
    pairs = ((key if isinstance(key, str) else repr(comparable(key)), comparable(own)) for key, own in value.items())
    return dict(sorted(pairs, key=lambda pair: pair[0]))


def _of_object(value: Any) -> Any:
    if isinstance(value, torch.device):
        return f"a device of type {value.type}"
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, _BY_REPR):
        return repr(value)
    if isinstance(value, functools.partial):
        return _name(type(value)), comparable(value.func), comparable(value.args), _of_items(value.keywords)
    if is_dataclass(value) and not isinstance(value, type):
        return _name(type(value)), {one.name: comparable(getattr(value, one.name, None)) for one in fields(value)}
    if not hasattr(value, "__qualname__"):
        return f"an object of {_name(type(value))}"
    code = getattr(value, "__code__", None)
    return f"{_name(value)} of code {_of_code(code)}" if isinstance(code, CodeType) else _name(value)


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _of_code(code: CodeType) -> str:
    constants = [_of_code(one) if isinstance(one, CodeType) else comparable(one) for one in code.co_consts]
    read = (code.co_code, code.co_names, code.co_varnames, constants)
    return blake2b(repr(read).encode(), digest_size=4).hexdigest()
