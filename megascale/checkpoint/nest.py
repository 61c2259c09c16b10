"""Splits nested dicts, lists and tensors into a JSON tree and a flat dict of tensors.

The tree goes into the manifest, the tensors into the data files. Nothing is pickled, so loading executes nothing.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megascale.errors import ArgumentError, ArgumentTypeError, CheckpointError
from megascale.utils.autograd import detached
from megascale.utils.portable import PRIMITIVES, plain

Tree: TypeAlias = Any
"""JSON: a primitive stands for itself, a tensor is the array of its key, dtype and shape, and everything else an object
of one key, such as dict, list or bytes.

JSON's arrays are tuples here until they are read from a file: Python's garbage collector stops to visit those.
"""


@dataclass(frozen=True)
class Form:
    """Stands for a tensor of a checkpoint where a tree is changed before any tensor is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def flatten(nest: Any, name: str) -> tuple[Tree, dict[str, Tensor]]:
    """Split ``nest`` into a JSON tree and its tensors, which are not copied.

    Args:
        nest: dicts, lists and tuples of tensors (strided, any device; DTensor too), bytes, None, bool, int, float, str,
            dtypes and devices. Keys of dicts are str, int, float, bool or None. Numbers of numpy and members of enums
            become Python's own.
        name: the nest's name, the first part of every tensor's key.

    Raises:
        ArgumentTypeError: it contains something else; the message says where.
        ArgumentError: a tensor is sparse or has no data.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(nest, name, tensors), tensors


def unflatten(tree: Tree, tensors: Mapping[str, Tensor | Form]) -> Any:
    """Return the nest of a tree and the tensors of its keys."""
    return _decode(tree, lambda key, dtype, shape: tensors[key])


def leaves(tree: Tree) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Yield key, shape and dtype of every tensor of a tree."""
    found: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    _decode(tree, lambda key, dtype, shape: found.append((key, tuple(shape), _dtype(dtype))))
    return iter(found)


def join(path: str, key: Any) -> str:
    """Return the key of the value under ``key`` in ``path``: "a/b" differs from "a" then "b", 0 from "0"."""
    if isinstance(key, str):
        return f"{path}/{key.replace('%', '%25').replace('/', '%2F').replace('#', '%23')}"
    return f"{path}/#{key!r}"


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Tree:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise ArgumentError(
                f"{path} is a tensor that a checkpoint cannot hold ({value.layout}, {value.dtype}, on {value.device}): "
                "convert it to a dense tensor of a plain dtype, with values"
            )
        tensors[path] = detached(value)
    if isinstance(value, (Tensor, Form)):
        return path, str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            name = plain(key)
            if not isinstance(name, PRIMITIVES):
                raise ArgumentTypeError(
                    f"{path} has the key {key!r} of type {type(key).__name__}; keys are str, int, float, bool or None"
                )
            pairs.append((name, _encode(item, join(path, name), tensors)))
        return {"dict": tuple(pairs)}
    if isinstance(value, (list, tuple)):
        nodes = [_encode(item, join(path, place), tensors) for place, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": tuple(nodes)}
    value = plain(value)
    if isinstance(value, PRIMITIVES):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    raise ArgumentTypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds tensors, dicts, lists, "
        "tuples, bytes, None, bool, int, float, str, dtypes and devices: convert it, e.g. a numpy array with "
        "torch.from_numpy"
    )


def _decode(tree: Tree, tensor_of: Callable[[str, str, Sequence[int]], Any]) -> Any:
    if isinstance(tree, PRIMITIVES):
        return tree
    if isinstance(tree, (tuple, list)):
        return tensor_of(*tree)
    [(kind, content)] = tree.items()
    match kind:
        case "dict":
            return {key: _decode(item, tensor_of) for key, item in content}
        case "list":
            return [_decode(item, tensor_of) for item in content]
        case "tuple":
            return tuple([_decode(item, tensor_of) for item in content])
        case "bytes":
            return base64.b64decode(content)
        case "dtype":
            return _dtype(content)
        case "device":
            return torch.device(content)
    raise CheckpointError(f"the manifest holds {kind!r}, which this version of megascale does not know")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint holds the dtype {name!r}, which this torch {torch.__version__} lacks")
    return dtype
