"""Lists of tensors that cache addresses and types: reading these dominates the cost of many small tensors."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, ne
from typing import Any, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels.tensors import tensor_reader
from megascale.kernels.tensors.checked_memory import is_plain, memory_fault
from megascale.kernels.tensors.tensor_reader import Facts, Memory, Room
from megascale.utils.cached import cached

# attrgetters, as map() then runs in C: at every step, over every tensor.
_DTYPE = attrgetter("dtype")
_DEVICE = attrgetter("device")
_LAYOUT = attrgetter("layout")
_GRAD = attrgetter("grad")
_FORM: tuple[Callable[[Tensor], Any], ...] = (Tensor.numel, Tensor.stride, _DTYPE, _DEVICE, Tensor.is_neg)
_LOOK: dict[str, Callable[[Tensor], int]] = {
    "versions": attrgetter("_version"),
    "pointers": Tensor.data_ptr,
    "numels": Tensor.numel,
    "requires_grad": attrgetter("requires_grad"),
}


class Forms:
    """The forms of tensors, that is all but their addresses: columns with one item per tensor.

    If all items of two tensors are equal, so are shape, strides, dtype, device and flag bits. Forms that were read in
    different ways always count as different.
    """

    def __init__(self, columns: tuple[Any, ...]) -> None:
        self._columns = columns

    def at(self, places: slice | NDArray[np.int64]) -> "Forms":
        """Return the forms of the tensors at some indices."""
        if isinstance(places, slice) or self._is_array:
            return Forms(tuple(column[places] for column in self._columns))
        return Forms(tuple([column[place] for place in places.tolist()] for column in self._columns))

    def copy(self) -> "Forms":
        """Return a copy of the columns."""
        return Forms(tuple(column.copy() for column in self._columns))

    def put(self, place: int, other: "Forms", there: int) -> bool:
        """Copy one tensor's form. Returns False if it was read in another way."""
        if self._is_array != other._is_array:
            return False
        for column, theirs in zip(self._columns, other._columns, strict=True):
            column[place] = theirs[there]
        return True

    def differ(self, other: "Forms") -> NDArray[np.bool_]:
        """Return, for each tensor, whether the forms differ."""
        count = len(self._columns[0])
        if self._is_array != other._is_array:
            return np.ones(count, np.bool_)
        found = np.zeros(count, np.bool_)
        for mine, theirs in zip(self._columns, other._columns, strict=True):
            if self._is_array:
                found |= mine != theirs
            elif mine != theirs:
                found |= np.fromiter(map(ne, mine, theirs), np.bool_, count)
        return found

    @property
    def _is_array(self) -> bool:
        return isinstance(self._columns[0], np.ndarray)


class TensorList(Sequence[Tensor]):
    """Tensors of one step. Neither the list nor the tensors' memory changes while it is in use.

    Attributes are cached, so that passes after the first cost nothing per tensor. For thousands of tensors all are read
    in one walk, see :mod:`megascale.kernels.tensors.tensor_reader`; else attribute by attribute, when needed.

    Args:
        tensors: a list is used as it is, not copied.
        among: choose the way of reading (one walk or not) for this number of tensors; None: for their own number.
        room: reusable memory for the result of a walk; None: new memory.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), among: int | None = None, room: Room | None = None) -> None:
        self._given = tensors if isinstance(tensors, list) else list(tensors)
        self._among = len(self._given) if among is None else among
        self._room = room

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "TensorList":
        """Return ``tensors`` itself where it is one, else a new one."""
        return tensors if isinstance(tensors, TensorList) else cls(tensors)

    @classmethod
    def joined(cls, parts: Sequence["TensorList"]) -> "TensorList":
        """Return one list of several. Its parts share what it reads."""
        return parts[0] if len(parts) == 1 else _Joined(parts)

    @property
    def parts(self) -> Sequence["TensorList"]:
        """The lists that this one joins, in order; itself if it is not joined."""
        return (self,)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors themselves."""
        return self._given

    def hold(self) -> None:
        """Keep the tensors alive."""

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

    def findings(self, owner: object) -> dict[str, Any]:
        """Return a cache, as a dict, of what ``owner`` has derived from the tensors' memory.

        It is empty after any change but of versions and of gradients' addresses, and where changes cannot be detected.
        It outlives this list: never put arrays of this list, or tensors, into it.
        """
        found = None if self._facts is None else self._facts.findings
        return {} if found is None else found.setdefault(owner, {})

    @cached
    def versions(self) -> NDArray[np.int64]:
        """Versions: how many times torch has written each, shape [len(self)]."""
        return self._looked_up("versions") if self._facts is None else self._facts.versions

    @cached
    def pointers(self) -> NDArray[np.int64]:
        """Addresses, shape [len(self)]."""
        return self._looked_up("pointers") if self._memory is None else self._memory.pointers

    @cached
    def numels(self) -> NDArray[np.int64]:
        """Numbers of elements, shape [len(self)]."""
        return self._looked_up("numels") if self._memory is None else self._memory.numels

    @cached
    def forms(self) -> Forms:
        """The form of each: shape, strides, dtype, device and flag bits."""
        if self._memory is not None:
            return Forms((self._memory.kinds, self._memory.layouts))
        return Forms(tuple(_of_each(look, self) for look in _FORM))

    @cached
    def places(self) -> bytes:
        """A key of the tensors' addresses and devices."""
        return self.pointers.tobytes()

    @cached
    def form(self) -> Hashable:
        """A key of the forms of plain tensors. Lists that were read in different ways have different keys."""
        if self._memory is not None:
            return self._memory.kinds.tobytes(), self._memory.layouts.tobytes()
        layouts: tuple[Hashable, ...] = ()
        if not self.contiguous:
            layouts = tuple((i, each.shape, each.stride()) for i, each in enumerate(self) if not each.is_contiguous())
        return self.numels.tobytes(), tuple(map(_DTYPE, self)), frozenset(self.devices), layouts

    @cached
    def requires_grad(self) -> NDArray[np.int64]:
        """1 where a tensor requires grad, else 0, shape [len(self)]."""
        return self._looked_up("requires_grad") if self._facts is None else self._facts.requires_grad

    @cached
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes that occur."""
        return set(map(_DTYPE, self._examples))

    @cached
    def devices(self) -> set[torch.device]:
        """The devices that occur."""
        return set(map(_DEVICE, self._examples))

    def are_plain(self) -> bool:
        """Return whether kernels can read all: strided, with storage for all elements, no conj, neg or zero bit."""
        if self._memory is not None:
            return True
        if not set(map(_LAYOUT, self)) <= {torch.strided}:
            return False
        if not self.contiguous:
            return all(memory_fault(tensor) is None and is_plain(tensor) for tensor in self)
        storages = np.array(list(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, self))), dtype=np.int64)
        ends = np.array(list(map(Tensor.storage_offset, self)), dtype=np.int64) + self.numels
        itemsizes = np.array(list(map(Tensor.element_size, self)), dtype=np.int64)
        are_held = (ends * itemsizes <= storages) & ((self.pointers != 0) | (self.numels == 0))
        return bool(are_held.all()) and not any(map(Tensor.is_neg, self)) and not any(map(Tensor.is_conj, self))

    @cached
    def contiguous(self) -> bool:
        """Whether all of them are contiguous."""
        return all(map(Tensor.is_contiguous, self._examples))

    def dtype_codes(self, codes: Mapping[torch.dtype, int]) -> NDArray[np.int64]:
        """Return the code of each tensor's dtype, shape [len(self)]."""
        if self._kinds is None:
            return np.array([codes[dtype] for dtype in map(_DTYPE, self)], dtype=np.int64)
        if len(self._kinds) == 1:
            return np.full(len(self), codes[self._kinds[0][0].dtype], dtype=np.int64)
        found = np.empty(len(self), dtype=np.int64)
        for example, members in self._kinds:
            found[members] = codes[example.dtype]
        return found

    @cached
    def _facts(self) -> Facts | None:
        """The result of one walk; None if attributes are read one by one."""
        return tensor_reader.read(self._given, among=self._among, room=self._room)

    @property
    def _memory(self) -> Memory | None:
        """The tensors' memory as one walk has read it, or None."""
        return None if self._facts is None else self._facts.memory

    @cached
    def _kinds(self) -> list[tuple[Tensor, NDArray[np.bool_]]] | None:
        """One tensor of each kind, and a mask of that kind's tensors; None without a walk."""
        return None if self._memory is None else [(self[first], members) for first, members in self._members]

    @property
    def _members(self) -> list[tuple[int, NDArray[np.bool_]]]:
        """The index of the first tensor of each kind, and a mask of that kind's tensors. Needs a walk."""
        return [] if self._memory is None else _by_kind(self._memory.kinds)

    @property
    def _examples(self) -> Iterable[Tensor]:
        """Some tensors that cover every dtype, every device and any that are not contiguous."""
        return self.tensors if self._kinds is None else [example for example, _ in self._kinds]

    def _looked_up(self, name: str) -> NDArray[np.int64]:
        return np.array(_of_each(_LOOK[name], self), dtype=np.int64)


def _by_kind(kinds: NDArray[np.int64]) -> list[tuple[int, NDArray[np.bool_]]]:
    """Return, for each distinct number, its first index and the mask of its occurrences."""
    found = []
    rest = np.ones(len(kinds), dtype=np.bool_)
    while rest.any():
        first = int(rest.argmax())
        members = kinds == kinds[first]
        found.append((first, members))
        rest &= ~members
    return found


def _of_each(look: Callable[[Tensor], Any], tensors: Iterable[Tensor]) -> list[Any]:
    """Return ``look(tensor)`` of each tensor; -1 for one without memory, such as a sparse one."""
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
    """Parameters. One walk over thousands of them also reads what :class:`GradList` needs."""

    def grads(self, params: list[Tensor], places: slice | NDArray[np.int64], owner: object = None) -> "GradList":
        """Return the gradients of ``params``, the parameters at ``places``, as they were at the walk.

        ``owner``: keeps a cache of findings, see :meth:`findings`, and always passes the same places. None: no cache.
        """
        facts = self._facts
        memory = None if facts is None or facts.grads is None else facts.grads.at(places)
        found = None if owner is None else self.findings(owner)
        return GradList(params, memory, self.forms.at(places), found)

    @cached
    def _facts(self) -> Facts | None:
        return tensor_reader.read(self._given, among=self._among, grads=True, room=self._room)


class GradList(TensorList):
    """The gradients of parameters.

    Before :meth:`hold`, or an iteration over them, only their parameters keep them alive.

    Args:
        params: a list is used as it is, not copied.
        memory: as one walk has read it; None: read from each gradient when needed.
        forms_of_params: as the walk has read them; None: each gradient is compared with its parameter.
        findings: cached findings for this memory and these parameters' forms.
    """

    def __init__(
        self,
        params: Iterable[Tensor] = (),
        memory: Memory | None = None,
        forms_of_params: Forms | None = None,
        findings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(params)
        self._found = {} if findings is None or memory is None else findings
        self._read = memory
        self._forms_of_params = forms_of_params

    @property
    def tensors(self) -> list[Tensor]:
        """The gradients themselves."""
        return self._held

    def hold(self) -> None:
        """See :class:`TensorList`."""
        self._held  # noqa: B018

    def fit(self) -> bool:
        """Return whether every parameter has a gradient of its shape and device that kernels can read.

        It is a plain tensor then, as :mod:`megascale.kernels.tensors.checked_memory` says.
        """
        if "fit" not in self._found:
            self._found["fit"] = self._all_fit()
        return bool(self._found["fit"])

    def _all_fit(self) -> bool:
        if self._read is None and not (set(map(type, self)) <= {Tensor} and self.are_plain()):
            return False
        if self._forms_of_params is None:
            return all(map(_fits, self, self._given))
        differ = np.flatnonzero(self.forms.differ(self._forms_of_params))
        return all(_fits(self[index], self._given[index]) for index in differ.tolist())

    def __getitem__(self, index: Any) -> Any:
        is_held = "_held" in self.__dict__ or not isinstance(index, int)
        return self._held[index] if is_held else self._given[index].grad

    @cached
    def _held(self) -> list[Tensor]:
        return list(map(_GRAD, self._given))

    @cached
    def _facts(self) -> Facts | None:
        return None

    @property
    def _memory(self) -> Memory | None:
        return self._read

    @property
    def _members(self) -> list[tuple[int, NDArray[np.bool_]]]:
        if "members" not in self._found:
            self._found["members"] = super()._members
        return cast("list[tuple[int, NDArray[np.bool_]]]", self._found["members"])


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
    def parts(self) -> Sequence[TensorList]:
        return self._parts

    @property
    def tensors(self) -> list[Tensor]:
        return self._held

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def dtype_codes(self, codes: Mapping[torch.dtype, int]) -> NDArray[np.int64]:
        return np.concatenate([part.dtype_codes(codes) for part in self._parts])

    @cached
    def _held(self) -> list[Tensor]:
        return [tensor for part in self._parts for tensor in part]

    @property
    def _examples(self) -> Iterable[Tensor]:
        return chain.from_iterable(part._examples for part in self._parts)

    @cached
    def _facts(self) -> Facts | None:
        return None

    def _looked_up(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(part, name) for part in self._parts])
