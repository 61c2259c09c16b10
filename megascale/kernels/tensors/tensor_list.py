"""Lists of tensors that cache addresses and forms: reading these dominates the cost of many small tensors."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels.tensors.forms import Forms

T = TypeVar("T")


class TensorList(Sequence[Any]):
    """Tensors of one step. Neither the list nor the tensors' memory changes while it is in use.

    One may be missing: None in place of a gradient. Tables of kernels are made of the forms of all, so that one serves
    whichever are missing: other tensors stand in for them.

    Args:
        tensors: a list is used as it is, not copied.
        forms: of the tensors, where they are known; None: they are read when needed.
        pointers: the tensors' addresses, likewise.
        filled: the tensors, and those that stand in for missing ones; None: the first tensor stands in for all.

    Attributes:
        missing: indices of missing tensors.
        num_there: how many are not missing.
        parts: the lists that this one was cut into, in order.
        on_device: the addresses, where a kernel reads them.
    """

    on_device: Tensor | None = None

    def __init__(
        self,
        tensors: Iterable[Tensor | None] = (),
        forms: Forms | None = None,
        pointers: NDArray[np.int64] | None = None,
        filled: list[Tensor] | None = None,
    ) -> None:
        self.tensors: list[Any] = tensors if isinstance(tensors, list) else list(tensors)
        self.missing: list[int] = []
        if filled is not self.tensors:
            self.missing = [index for index, tensor in enumerate(self.tensors) if tensor is None]
        self.num_there = len(self.tensors) - len(self.missing)
        self.parts: Sequence[TensorList] = ()
        if filled is not None:
            self.filled = filled
        if forms is not None:
            self.forms = forms
        if pointers is not None:
            self.pointers = pointers

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], likes: Sequence[Tensor] = ()) -> "TensorList":
        """Return ``tensors`` itself where it is one, else a new one. ``likes`` stand in for missing ones."""
        if isinstance(tensors, TensorList):
            return tensors
        pairs = zip(tensors, likes, strict=True) if likes else ()
        return cls(tensors, filled=[like if one is None else one for one, like in pairs] if likes else None)

    def cut(self, slices: Sequence[slice]) -> "list[TensorList]":
        """Return the parts of the list, which share what it has read. ``slices`` follow each other, and cover it."""
        if len(slices) == 1:
            return [self]
        parts = []
        for part, forms in zip(slices, self.forms.cut(slices), strict=True):
            tensors = self.tensors[part]
            filled = self.filled[part] if self.missing else tensors
            parts.append(TensorList(tensors, forms, self.pointers[part], filled))
            if self.on_device is not None:
                parts[-1].on_device = self.on_device[part]
        self.parts = parts
        return parts

    def beside(self, column: Sequence[T]) -> Sequence[T]:
        """Return those items of a column, of the same length, beside which a tensor is not missing."""
        return (
            [item for item, tensor in zip(column, self.tensors, strict=True) if tensor is not None]
            if self.missing
            else column
        )

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensors)

    def __getitem__(self, index: Any) -> Any:
        return self.tensors[index]

    @cached_property
    def filled(self) -> list[Tensor]:
        """The tensors, and what stands in for missing ones."""
        if not self.missing:
            return self.tensors
        first = next(filter(lambda tensor: tensor is not None, self.tensors))
        return [first if tensor is None else tensor for tensor in self.tensors]

    @cached_property
    def forms(self) -> Forms:
        """Shapes, strides, dtypes, devices and flags, also of what stands in for missing tensors."""
        return Forms(self.filled)

    @cached_property
    def pointers(self) -> NDArray[np.int64]:
        """Addresses, shape [len(self)], also of what stands in for missing tensors."""
        return np.fromiter(map(Tensor.data_ptr, self.filled), np.int64, len(self.filled))

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """Addresses, shape [len(self)]: 0 of a missing tensor, 1 of an empty one, which is there all the same."""
        addresses = np.maximum(self.pointers, 1)
        addresses[self.missing] = 0
        return addresses

    @cached_property
    def places(self) -> bytes:
        """A key of the addresses."""
        return self.addresses.tobytes()
