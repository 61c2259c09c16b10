"""Forms of tensors: everything that a kernel must know of one besides its address."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

PLAIN_TYPES = frozenset({Tensor, nn.Parameter})
"""What a tensor is that has memory of its own; any other type may be a wrapper."""

# map() calls these in C. The type comes first: of another type nothing else is asked, which its own code would answer.
LOOKS: tuple[Callable[[Any], Any], ...] = (
    type,
    attrgetter("dtype"),
    attrgetter("device"),
    attrgetter("shape"),
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_neg,
    Tensor.is_inference,
    attrgetter("requires_grad"),
)
_NUMBERS: dict[torch.dtype, int] = {}
"""A number for each dtype that was met."""


class Forms:
    """The forms of tensors: type, dtype, device, shape, strides and flags. Keeps no tensor alive.

    Raises an error for something that has no form: see :data:`megascale.kernels.UNREADABLE`.

    ``columns``: where they are known already.

    Attributes:
        columns: a list for each of :data:`LOOKS`, with one item per tensor.
        dtypes, shapes, strides, requires_grad: some of these.
    """

    def __init__(self, tensors: Sequence[Tensor], columns: list[list[Any]] | None = None) -> None:
        self.columns = columns = columns or [list(map(look, tensors)) for look in LOOKS]
        _, self.dtypes, self._devices, self.shapes, self.strides, self._contiguous, *flags = columns
        self._negative, self._of_inference, self.requires_grad = flags
        self._codes: dict[int, NDArray[np.int64]] = {}
        self._cut: tuple[Sequence[slice], list[Forms]] | None = None

    def cut(self, parts: Sequence[slice]) -> "list[Forms]":
        """Return the forms of each part of the list; the same objects while ``parts`` are the same."""
        if self._cut is None or self._cut[0] != parts:
            self._cut = parts, [Forms((), [column[part] for column in self.columns]) for part in parts]
        return self._cut[1]

    @cached_property
    def contiguous(self) -> bool:
        """Whether all are contiguous."""
        return all(self._contiguous)

    @cached_property
    def numels(self) -> NDArray[np.int64]:
        """Numbers of elements, one per tensor."""
        return np.fromiter(map(torch.Size.numel, self.shapes), np.int64, len(self.shapes))

    @cached_property
    def kinds(self) -> set[torch.dtype]:
        """The dtypes that occur."""
        return set(self.dtypes)

    @cached_property
    def devices(self) -> set[torch.device]:
        """The devices that occur."""
        return set(self._devices)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for lists of the same dtypes, lengths and layouts; it is hashed in no time."""
        layouts = () if self.contiguous else (repr((self.shapes, self.strides)),)
        for dtype in self.kinds:
            _NUMBERS.setdefault(dtype, len(_NUMBERS))
        numbers = bytes(map(_NUMBERS.__getitem__, self.dtypes))
        return self.numels.tobytes(), numbers, frozenset(self.devices), *layouts

    def dtype_codes(self, codes: Mapping[torch.dtype, int]) -> NDArray[np.int64]:
        """Return the code of each tensor's dtype, -1 where it has none: shape [tensors].

        ``codes``: a constant of a module.
        """
        if id(codes) not in self._codes:
            self._codes[id(codes)] = np.array([codes.get(dtype, -1) for dtype in self.dtypes], dtype=np.int64)
        return self._codes[id(codes)]

    @cached_property
    def are_plain(self) -> bool:
        """Whether kernels can read all, as far as forms tell: see :func:`megascale.kernels.tensor_fault`."""
        if any(self._negative) or any(self._of_inference) or any(dtype.is_complex for dtype in self.kinds):
            return False
        return self.contiguous or not any(map(has_zero_strides, self.shapes, self.strides))

    def fit(self, other: "Forms") -> bool:
        """Return whether tensors have the shapes and devices of others."""
        return self.shapes == other.shapes and self._devices == other._devices

    def are_whole(self, tensors: Sequence[Tensor], addresses: NDArray[np.int64], indices: NDArray[np.int64]) -> bool:
        """Return whether the storages of the ``tensors`` at ``indices``, which have these forms, hold all elements."""
        asked = tensors if len(indices) == len(tensors) else [tensors[index] for index in indices.tolist()]
        offsets = np.fromiter(map(Tensor.storage_offset, asked), np.int64, len(asked))
        nbytes = np.fromiter(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, asked)), np.int64, len(asked))
        reaches, itemsizes = self._extents
        ends = (offsets + reaches[indices]) * itemsizes[indices]
        are_there = (ends <= nbytes) & (addresses[indices] != 0)
        return bool((are_there | (self.numels[indices] == 0)).all())

    @cached_property
    def _extents(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The elements from the first to the last one in memory, and the bytes of one element."""
        reaches = self.numels
        if not self.contiguous:
            reaches = np.array(list(map(reach, self.shapes, self.strides)), dtype=np.int64)
        return reaches, np.array([dtype.itemsize for dtype in self.dtypes], dtype=np.int64)


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory lie between the first and the last one of a tensor, these included."""
    return sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1


def has_zero_strides(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements of a tensor share memory, as in ``expand()``."""
    return any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True))
