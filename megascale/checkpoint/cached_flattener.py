"""A nest that is flattened for one save after another: what has not changed since the last time is not made anew.

A checkpoint of 20,000 parameters has 100,000 keys. Between two saves only a few numbers and the tensors' values change.
"""

import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megascale.checkpoint.nest import Tree, checked_key, is_storable, join, tree_of_leaf
from megascale.main_params.shard import ParamShard

_revisions = itertools.count(1)


def form_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what the plan of a save needs to know of a tensor: shape, dtype, and where its parts lie."""
    if isinstance(tensor, ParamShard):
        return (ParamShard, tensor.shape, tensor.dtype, tensor.start, tensor.piece.numel())
    if isinstance(tensor, DTensor):
        return (DTensor, tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh)
    return (Tensor, tensor.shape, tensor.dtype)


class CachedFlattener:
    """Flattens a nest as :func:`~megascale.checkpoint.nest.flatten` does, again and again.

    Args:
        name: the nest's name, the first part of every tensor's key.

    Attributes:
        revision: a number that changes whenever the tensors' keys, order, shapes, dtypes or placements do. No two nests
            share one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._root: _Node | None = None
        self._forms: dict[tuple[Any, ...], _Form] = {}
        self.revision = 0

    def flatten(self, nest: Any) -> tuple[Tree, dict[str, Tensor]]:
        """Split ``nest`` into a JSON tree and its tensors, detached and not copied. Earlier trees are not changed.

        Raises:
            ArgumentError, ArgumentTypeError: as :func:`~megascale.checkpoint.nest.flatten`.
        """
        tensors: dict[str, Tensor] = {}
        root, self._root = self._root, None  # forgotten if this raises
        if root is None:
            root = self._node_of([nest], [self._name], None, tensors)
        else:
            self._update(root, [nest], tensors)
        self._root = root
        return root.trees()[0], tensors

    def crc32(self) -> int:
        """Return a checksum of what was flattened last: of names, shapes, dtypes and plain values."""
        return 0 if self._root is None else self._root.crc32()

    def _update(self, node: "_Node", values: Iterable[Any], tensors: dict[str, Tensor]) -> bool:
        """Bring the node of a container up to date with its ``values``. Returns whether its tree is another one now."""
        changed: dict[int, Tree] = {}
        paths = node.paths
        for index, (value, part) in enumerate(zip(values, node.parts, strict=True)):
            kind, known = type(value), type(part)
            if known is _Form:
                if part.fits(value, kind):
                    tensors[paths[index]] = value.detach() if value.requires_grad else value
                    continue
            elif known is _Node:
                if part.fits(value, kind):
                    if self._update(part, value if part.keys is None else value.values(), tensors):
                        changed[index] = part.tree
                    continue
            elif kind is known and _is_same(value, part):
                continue
            if known is _Form or known is _Node:
                self.revision = next(_revisions)  # as its tensors are gone
            node.parts[index], changed[index] = self._part_of(value, paths[index], tensors)
        if changed:
            node.put([changed.get(index, tree) for index, tree in enumerate(node.trees())])
        return bool(changed)

    def _part_of(self, value: Any, path: str, tensors: dict[str, Tensor]) -> tuple[Any, Tree]:
        """Return what a node keeps of a value that was not there before, and the value's tree."""
        if isinstance(value, Mapping):
            keys = [checked_key(key, path) for key in value]
            node = self._node_of(value, [join(path, key) for key in keys], keys, tensors)
            return node, node.tree
        if isinstance(value, (list, tuple)):
            node = self._node_of(value, [join(path, place) for place in range(len(value))], None, tensors)
            return node, node.tree
        tree = tree_of_leaf(value, path)
        if not isinstance(value, Tensor):
            return value, tree
        self.revision = next(_revisions)
        tensors[path] = value.detach()
        form = form_of(value)
        return self._forms.setdefault(form, _Form(form)), tree

    def _node_of(self, value: Any, paths: list[str], keys: list[Any] | None, tensors: dict[str, Tensor]) -> "_Node":
        """Return the node of a container. ``keys``: of a mapping."""
        self.revision = next(_revisions)
        values = value if keys is None else value.values()
        made = [self._part_of(item, path, tensors) for item, path in zip(values, paths, strict=True)]
        return _Node(value, paths, keys, made)


class _Form:
    """What was known of a tensor: what :func:`form_of` returned."""

    __slots__ = ("dtype", "form", "is_plain", "shape")

    def __init__(self, form: tuple[Any, ...]) -> None:
        self.form = form
        kind, self.shape, self.dtype = form[:3]
        self.is_plain = kind is Tensor

    def fits(self, value: Any, kind: type) -> bool:
        """Return whether ``value``, of type ``kind``, is a tensor of which the same is known, that can be saved."""
        if self.is_plain and (kind is Tensor or kind is nn.Parameter):
            return (
                value.shape == self.shape
                and value.dtype is self.dtype
                and value.layout is torch.strided
                and not value.is_meta
            )
        return isinstance(value, Tensor) and form_of(value) == self.form and is_storable(value)


class _Node:
    """A container as it was flattened last.

    Attributes:
        keys: of a mapping, in order; None of a list or tuple.
        paths: the key that a tensor has in each place.
        parts: for each value its node, its form, or the plain value itself.
        tree: the container's tree, never changed in place.
    """

    __slots__ = ("_crc32", "_kind", "_reprs", "keys", "parts", "paths", "tree")

    def __init__(self, value: Any, paths: list[str], keys: list[Any] | None, made: Sequence[tuple[Any, Tree]]) -> None:
        self._kind = type(value)
        self.keys = None if keys is None else tuple(keys)
        # 1, 1.0 and True are equal keys with paths of their own. Of str the comparison says all.
        self._reprs = None if keys is None or all(type(key) is str for key in keys) else list(map(repr, keys))
        self.paths = paths
        self.parts = [part for part, _ in made]
        self.put([tree for _, tree in made])

    def fits(self, value: Any, kind: type) -> bool:
        """Return whether ``value``, of type ``kind``, is such a container with the same keys."""
        if kind is not self._kind:
            return False
        if self.keys is None:
            return len(value) == len(self.parts)
        return tuple(value) == self.keys and (self._reprs is None or list(map(repr, value)) == self._reprs)

    def trees(self) -> Sequence[Tree]:
        """Return the values' trees."""
        [content] = self.tree.values()
        return content if self.keys is None else [tree for _, tree in content]

    def put(self, trees: list[Tree]) -> None:
        """Make a new tree of the values' ``trees``."""
        self._crc32: int | None = None
        if self.keys is None:
            self.tree: Tree = {"tuple" if issubclass(self._kind, tuple) else "list": tuple(trees)}
        else:
            self.tree = {"dict": tuple(zip(self.keys, trees, strict=True))}

    def crc32(self) -> int:
        """Return a checksum of the tree."""
        if self._crc32 is None:
            own = [
                [part.crc32()] if type(part) is _Node else tree
                for part, tree in zip(self.parts, self.trees(), strict=True)
            ]
            text = json.dumps([next(iter(self.tree)), self.keys, own])
            self._crc32 = zlib.crc32(text.encode())
        return self._crc32


def _is_same(value: Any, known: Any) -> bool:
    """Return whether two plain values of one type have one tree: -0.0 is not 0.0."""
    return value is known or (value == known and (bool(value) or repr(value) == repr(known)))
