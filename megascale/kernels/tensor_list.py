"""Lists of tensors whose addresses and types are looked up once: for many small tensors, looking is what costs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import add, attrgetter, le, mul
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels import tensor_reader
from megascale.kernels.checked_memory import is_plain, memory_fault
from megascale.kernels.tensor_reader import Facts, Memory

# Called for every tensor at every step, in loops that run in C.
_DTYPE = attrgetter("dtype")
_DEVICE = attrgetter("device")
_LAYOUT = attrgetter("layout")
_GRAD = attrgetter("grad")
_NBYTES = attrgetter("nbytes")
_IS_FLOATING_POINT = attrgetter("is_floating_point")
_FORM: tuple[Callable[[Tensor], Any], ...] = (Tensor.numel, Tensor.stride, _DTYPE, _DEVICE, Tensor.is_neg)
_LOOK: dict[str, Callable[[Tensor], int]] = {
    "versions": attrgetter("_version"),
    "pointers": Tensor.data_ptr,
    "numels": Tensor.numel,
    "requires_grad": attrgetter("requires_grad"),
}


class TensorList(Sequence[Tensor]):
    """Tensors of one step. Neither the list nor the tensors' memory changes while it is in use.

    What is looked up is kept, so that passes after the first cost nothing per tensor. Of thousands of tensors all is
    looked up at once, see :mod:`megascale.kernels.tensor_reader`; else attribute by attribute, when it is asked for.

    Args:
        tensors: a list is used as it is, not copied.
        among: look in the way in which so many tensors are looked at; None: as many as they are.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), among: int | None = None) -> None:
        self._given = tensors if isinstance(tensors, list) else list(tensors)
        self._among = len(self._given) if among is None else among

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "TensorList":
        """Return ``tensors`` itself where it is one, else a new one."""
        return tensors if isinstance(tensors, TensorList) else cls(tensors)

    @classmethod
    def joined(cls, parts: Sequence["TensorList"]) -> "TensorList":
        """Return one list of several. What is looked up in it is known to its parts."""
        return parts[0] if len(parts) == 1 else _Joined(parts)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors themselves."""
        return self._given

    def hold(self) -> None:
        """Keep the tensors alive, whoever else lets go of them."""

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.tensors[index]

    @cached_property
    def versions(self) -> NDArray[np.int64]:
        """How often torch has written each, shape [len(self)]."""
        return self._looked_up("versions") if self._facts is None else self._facts.versions

    @cached_property
    def pointers(self) -> NDArray[np.int64]:
        """Addresses, shape [len(self)]."""
        return self._looked_up("pointers") if self._memory is None else self._memory.pointers

    @cached_property
    def numels(self) -> NDArray[np.int64]:
        """Elements of each, shape [len(self)]."""
        return self._looked_up("numels") if self._memory is None else self._memory.numels

    @cached_property
    def forms(self) -> NDArray[np.int64] | list[tuple[Any, ...]]:
        """What each is but for its address: the same for tensors of the same shape, strides, dtype, device and bits.

        Of tensors that were read otherwise it is something else.
        """
        if self._memory is not None:
            return self._memory.kinds ^ self._memory.layouts
        return list(zip(*(_of_each(look, self) for look in _FORM), strict=True))

    @cached_property
    def requires_grad(self) -> NDArray[np.int64]:
        """1 where a tensor requires grad, else 0, shape [len(self)]."""
        return self._looked_up("requires_grad") if self._facts is None else self._facts.requires_grad

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes there are."""
        return set(map(_DTYPE, self._examples))

    @cached_property
    def devices(self) -> set[torch.device]:
        """Where they are."""
        return set(map(_DEVICE, self._examples))

    @cached_property
    def contiguous(self) -> bool:
        """Whether all of them are contiguous."""
        return all(map(Tensor.is_contiguous, self._examples))

    def dtype_codes(self, codes: Mapping[torch.dtype, int]) -> NDArray[np.int64]:
        """Return the code of each one's dtype, shape [len(self)]."""
        if self._kinds is None:
            return np.array([codes[dtype] for dtype in map(_DTYPE, self)], dtype=np.int64)
        found = np.empty(len(self), dtype=np.int64)
        for example, members in self._kinds:
            found[members] = codes[example.dtype]
        return found

    @cached_property
    def _facts(self) -> Facts | None:
        """What was read in one walk."""
        return tensor_reader.read(self._given, among=self._among)

    @property
    def _memory(self) -> Memory | None:
        """What was read of where they lie."""
        return None if self._facts is None else self._facts.memory

    @cached_property
    def _kinds(self) -> list[tuple[Tensor, NDArray[np.bool_]]] | None:
        """One tensor of each kind, and who is of that kind, where all were read in one walk."""
        if self._memory is None:
            return None
        kinds, found = self._memory.kinds, []
        rest = np.ones(len(kinds), dtype=np.bool_)
        while rest.any():
            first = int(rest.argmax())
            members = kinds == kinds[first]
            found.append((self[first], members))
            rest &= ~members
        return found

    @property
    def _examples(self) -> Iterable[Tensor]:
        """Tensors among which every dtype and device occurs, and what is not contiguous."""
        return self.tensors if self._kinds is None else [example for example, _ in self._kinds]

    def _looked_up(self, name: str) -> NDArray[np.int64]:
        return np.array(_of_each(_LOOK[name], self), dtype=np.int64)


def _of_each(look: Callable[[Tensor], Any], tensors: Iterable[Tensor]) -> list[Any]:
    """Return what a look at each tensor tells; -1 for one that has no memory of its own, such as a sparse one."""
    try:
        return list(map(look, tensors))
    except RuntimeError:
        return [_or_nowhere(look, tensor) for tensor in tensors]


def _or_nowhere(look: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    try:
        return look(tensor)
    except RuntimeError:
        return -1


class ParamList(TensorList):
    """Parameters. Of thousands, all is looked up together with what :class:`GradList` needs to know."""

    def grads(self, params: list[Tensor], places: slice | NDArray[np.int64]) -> "GradList":
        """Return the gradients of ``params``, the parameters at these places, as they were when all was looked up."""
        facts = self._facts
        if facts is None or facts.grads is None:
            return GradList(params)
        return GradList(params, facts.grads.at(places), facts.memory.at(places))

    @cached_property
    def _facts(self) -> Facts | None:
        return tensor_reader.read(self._given, among=self._among, grads=True)


class GradList(TensorList):
    """The gradients of parameters.

    Until :meth:`hold`, or until one passes over them, their parameters alone keep them alive.

    Args:
        params: a list is used as it is, not copied.
        memory: what was read of all gradients; None: what is to be known is looked up in each.
        memory_of_params: the same of the parameters.
    """

    def __init__(
        self, params: Iterable[Tensor] = (), memory: Memory | None = None, memory_of_params: Memory | None = None
    ) -> None:
        super().__init__(params)
        self._read = memory
        self._read_of_params = memory_of_params

    @property
    def tensors(self) -> list[Tensor]:
        """The gradients themselves."""
        return self._held

    def hold(self) -> None:
        """See :class:`TensorList`."""
        self._held  # noqa: B018

    def fit(self) -> bool:
        """Return whether every parameter has a gradient of its shape, on its device, that kernels read as it lies.

        It is a plain tensor then, as :mod:`megascale.kernels.checked_memory` says.
        """
        if self._read is None or self._read_of_params is None:
            return set(map(type, self)) <= {Tensor} and set(map(_LAYOUT, self)) <= {torch.strided} and self._fit()
        mine, theirs = self._read, self._read_of_params
        differ = (mine.kinds != theirs.kinds) | (mine.layouts != theirs.layouts)
        return all(_fits(self[index], self._given[index]) for index in np.flatnonzero(differ).tolist())

    def _fit(self) -> bool:
        if not self.contiguous:
            return all(map(_fits, self, self._given))
        starts = map(mul, map(Tensor.storage_offset, self), map(Tensor.element_size, self))
        ends = map(add, starts, map(_NBYTES, self))
        storages = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, self))
        return (
            list(map(Tensor.size, self)) == list(map(Tensor.size, self._given))
            and list(map(_DEVICE, self)) == list(map(_DEVICE, self._given))
            and all(map(le, ends, storages))
            and not any(map(Tensor.is_neg, self))
            and bool(((self.pointers != 0) | (self.numels == 0)).all())
            and all(map(_IS_FLOATING_POINT, self.dtypes))
        )

    def __getitem__(self, index: Any) -> Any:
        return self._given[index].grad if isinstance(index, int) else self._held[index]

    @cached_property
    def _held(self) -> list[Tensor]:
        return list(map(_GRAD, self._given))

    @cached_property
    def _facts(self) -> Facts | None:
        return None

    @property
    def _memory(self) -> Memory | None:
        return self._read


def _fits(grad: Tensor, param: Tensor) -> bool:
    return (
        grad.shape == param.shape
        and grad.device == param.device
        and grad.dtype.is_floating_point
        and is_plain(grad)
        and memory_fault(grad) is None
    )


class _Joined(TensorList):
    """Several lists as one."""

    def __init__(self, parts: Sequence[TensorList]) -> None:
        super().__init__()
        self._parts = parts

    @property
    def tensors(self) -> list[Tensor]:
        return self._held

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def dtype_codes(self, codes: Mapping[torch.dtype, int]) -> NDArray[np.int64]:
        return np.concatenate([part.dtype_codes(codes) for part in self._parts])

    @cached_property
    def _held(self) -> list[Tensor]:
        return [tensor for part in self._parts for tensor in part]

    @property
    def _examples(self) -> Iterable[Tensor]:
        return chain.from_iterable(part._examples for part in self._parts)

    @cached_property
    def _facts(self) -> Facts | None:
        return None

    def _looked_up(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(part, name) for part in self._parts])
