"""Nests: dicts, lists and tuples of tensors and plain values, as optimizers keep them for a parameter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return ``nest`` with ``function`` of each tensor in its place. Containers are new."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return {key: map_tensors(function, value) for key, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        values = [map_tensors(function, value) for value in nest]
        return type(nest)(*values) if hasattr(nest, "_make") else type(nest)(values)  # a named tuple's
    return nest


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``nest``, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, (Mapping, list, tuple)):
        for value in nest.values() if isinstance(nest, Mapping) else nest:
            yield from tensors_in(value)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values of a state dict are equal; tensors: in all elements."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is type(other) and isinstance(one, Mapping):
        return one.keys() == other.keys() and all(are_equal(value, other[key]) for key, value in one.items())
    if type(one) is type(other) and isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)
