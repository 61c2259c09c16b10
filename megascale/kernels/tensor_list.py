"""Lists of tensors whose addresses and types are looked up once: for many small tensors, looking is what costs."""

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Called for every tensor at every step, in loops that run in C.
_DTYPE = attrgetter("dtype")
_DEVICE = attrgetter("device")


class TensorList(list[Tensor]):
    """Tensors of one step. Neither the list nor the tensors' memory changes while it is in use.

    What is looked up is kept, so that passes after the first cost nothing per tensor.
    """

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "TensorList":
        """Return ``tensors`` itself where it is one, else a new one."""
        return tensors if isinstance(tensors, TensorList) else cls(tensors)

    @classmethod
    def joined(cls, parts: Sequence["TensorList"]) -> "TensorList":
        """Return one list of several. What is looked up in it is known to its parts."""
        return parts[0] if len(parts) == 1 else _Joined(parts)

    @cached_property
    def pointers(self) -> NDArray[np.int64]:
        """Addresses, shape [len(self)]."""
        return np.array(list(map(Tensor.data_ptr, self)), dtype=np.int64)

    @cached_property
    def numels(self) -> NDArray[np.int64]:
        """Elements of each, shape [len(self)]."""
        return np.array(list(map(Tensor.numel, self)), dtype=np.int64)

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """The dtype of each."""
        return list(map(_DTYPE, self))

    @cached_property
    def devices(self) -> set[torch.device]:
        """Where they are."""
        return set(map(_DEVICE, self))

    @cached_property
    def contiguous(self) -> bool:
        """Whether all of them are contiguous."""
        return all(map(Tensor.is_contiguous, self))


class _Joined(TensorList):
    """Several lists as one."""

    def __init__(self, parts: Sequence[TensorList]) -> None:
        super().__init__(tensor for part in parts for tensor in part)
        self._parts = parts

    @cached_property
    def pointers(self) -> NDArray[np.int64]:
        return np.concatenate([part.pointers for part in self._parts])

    @cached_property
    def numels(self) -> NDArray[np.int64]:
        return np.concatenate([part.numels for part in self._parts])

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        return [dtype for part in self._parts for dtype in part.dtypes]

    @cached_property
    def devices(self) -> set[torch.device]:
        return set[torch.device]().union(*(part.devices for part in self._parts))

    @cached_property
    def contiguous(self) -> bool:
        return all(part.contiguous for part in self._parts)
