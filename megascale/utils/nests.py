"""Nests: dicts, lists and tuples of tensors and plain values, as optimizers keep them for a parameter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Any], Any], nest: Any, kinds: tuple[type, ...] = (Tensor,)) -> Any:
    """Return ``nest`` with ``function`` of each leaf of ``kinds`` in its place. Containers are new."""
    if isinstance(nest, kinds):
        return function(nest)
    if isinstance(nest, Mapping):
        return {key: map_tensors(function, value, kinds) for key, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)([map_tensors(function, value, kinds) for value in nest])
    return nest


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``nest``, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors_in(value)
    elif isinstance(nest, (list, tuple)):
        for value in nest:
            yield from tensors_in(value)
