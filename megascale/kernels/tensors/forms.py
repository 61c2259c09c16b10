"""What a step reads of its tensors, in lists: where they lie, and their forms, that is everything else.

A step asks every tensor for its address, for its place in its storage and for the storage's size, and compares forms
with those of an earlier step. Whatever it reads costs some 50 ns per tensor, and twice as much where the processor's
own cache no longer holds the tensor. So :meth:`Forms.places` asks torch about all parts of a form in one call, and goes
on to other tensors once all of some have been read.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

try:
    from torch._C._dynamo import guards
except ImportError:  # then every part of a form is read and compared
    TensorGuards: Any = None
else:
    TensorGuards = guards.TensorGuards

T = TypeVar("T")

UNREADABLE = (RuntimeError, TypeError, AttributeError)
"""What reading raises for something that is no tensor, or has no memory or strides of its own, as a sparse tensor."""

PLAIN_TYPES = frozenset({Tensor, nn.Parameter})
"""What a tensor is that has memory of its own; any other type may be a wrapper."""

# map() calls these in C.
_FORM: tuple[Callable[[Any], Any], ...] = (
    attrgetter("shape"),
    Tensor.stride,
    attrgetter("dtype"),
    attrgetter("device"),
    type,
    Tensor.is_neg,
    Tensor.is_inference,
    attrgetter("requires_grad"),
)
_OFFSET: Callable[[Tensor], Any] = Tensor.storage_offset
_STORAGE: Callable[[Tensor], Any] = Tensor.untyped_storage
_NBYTES: Callable[[Any], int] = torch.UntypedStorage.nbytes
_LIST: Callable[[Any], Any] = list
_NUMBERS: dict[torch.dtype, int] = {}
"""A number for each dtype that was met."""
BLOCK = 256
"""Tensors that are read together: what torch keeps of them, half a KiB each, stays in the processor's cache."""


class Places(NamedTuple):
    """Where tensors lie.

    Attributes:
        pointers: addresses of first elements, one per tensor; 0 for an empty one, and for one that lost its memory.
        offsets: of these in the tensors' storages, in elements; one per tensor that is asked for it.
        nbytes: of these storages, likewise.
        asked: per tensor, whether it is; None: all are.
    """

    pointers: list[int]
    offsets: list[int]
    nbytes: list[int]
    asked: list[bool] | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Places":
        """Read where tensors lie. Raises RuntimeError for a tensor without memory of its own, such as a sparse one."""
        places = cls([], [], [])
        places.add(tensors, 0)
        return places

    @classmethod
    def once_per_storage(cls, tensors: Sequence[Tensor]) -> "Places":
        """Read as much as tells later on whether tensors still lie in the same memory; raises as :meth:`of`.

        Only the first tensor of a storage is asked for it: as long as that has its address, its offset and its size,
        the memory at the addresses of the other ones is part of it.
        """
        storages = list(map(_STORAGE, tensors))  # held, so that ids stay unique
        first = {id(storages[index]): index for index in reversed(range(len(storages)))}
        asked = [first[id(storage)] == index for index, storage in enumerate(storages)]
        places = cls([], [], [], None if all(asked) else asked)
        places.add(tensors, 0)
        return places

    def add(self, tensors: Sequence[Tensor], start: int) -> None:
        """Read some of the tensors, which begin with the one at index ``start``."""
        asked = tensors
        if self.asked is not None:
            asked = list(compress(tensors, self.asked[start : start + len(tensors)]))
        self.pointers.extend(map(Tensor.data_ptr, tensors))
        self.offsets.extend(map(_OFFSET, asked))
        self.nbytes.extend(map(_NBYTES, map(_STORAGE, asked)))


class Forms:
    """The forms of tensors: type, dtype, device, shape, strides and flags. Keeps no tensor alive.

    Raises one of :data:`UNREADABLE` for something that has no form.

    Attributes:
        shapes, strides, dtypes: one item per tensor.
        contiguous: whether all of them are contiguous.
    """

    _fitted: "Forms | None" = None  # those that these were last found to fit

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._set(_read(tensors), contiguous=all(map(Tensor.is_contiguous, tensors)))

    def _set(self, columns: list[list[Any]], *, contiguous: bool) -> None:
        self._columns = columns
        self.shapes, self.strides, self.dtypes, self._devices, self._types, *self._flags = columns
        self.contiguous = contiguous
        self._guards: dict[int, Any] = {}
        self._codes: list[tuple[Mapping[torch.dtype, int], NDArray[np.int64]]] = []
        self._joined: tuple[list[Forms], Forms] | None = None

    @classmethod
    def joined(cls, parts: "Sequence[Forms]") -> "Forms":
        """Return the forms of several lists as those of one; the same object while ``parts`` are the same objects."""
        known = parts[0]._joined
        if known is None or len(known[0]) != len(parts) or any(map(_is_other, known[0], parts)):
            made = cls.__new__(cls)
            columns = [[item for part in parts for item in part._columns[index]] for index in range(len(_FORM))]
            made._set(columns, contiguous=all(part.contiguous for part in parts))
            known = parts[0]._joined = list(parts), made
        return known[1]

    def pick(self, indices: Sequence[int], *, contiguous: bool) -> "Forms":
        """Return the forms of the tensors at ``indices``. ``contiguous``: whether all of these are."""
        chosen = Forms.__new__(Forms)
        chosen._set([picked(column, indices) for column in self._columns], contiguous=contiguous)
        chosen._codes = [(codes, numbers[list(indices)]) for codes, numbers in self._codes]
        return chosen

    def __len__(self) -> int:
        return len(self.shapes)

    def places(self, tensors: Sequence[Any], asked: list[bool] | None = None) -> Places | None:
        """Return where these tensors lie, if they have these forms; they may be other tensors. Else None.

        ``asked``: those that are asked for their storage, see :class:`Places`.
        """
        if len(tensors) != len(self.shapes):
            return None
        places = Places([], [], [], asked)
        try:
            for start in range(0, len(tensors), BLOCK):
                block, guards = tensors[start : start + BLOCK], self._guards.get(start)
                if (guards is None or not guards.check(*block)) and not self._hold(start, block):
                    return None
                places.add(block, start)
        except UNREADABLE:
            return None
        return places

    def _hold(self, start: int, block: Sequence[Any]) -> bool:
        """Return whether tensors have the forms from index ``start`` on, and let guards tell so from now on."""
        part = slice(start, start + len(block))
        if _read(block) != [column[part] for column in self._columns]:
            return False
        # Guards say no, too, in another context than that of their construction, as under autocast.
        self._guards[start] = _guards(block, self.shapes[part], self.strides[part])
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_guards": {}}  # they cannot be copied

    @cached_property
    def numels(self) -> NDArray[np.int64]:
        """Numbers of elements, shape [len(self)]."""
        return np.fromiter(map(torch.Size.numel, self.shapes), np.int64, len(self.shapes))

    @cached_property
    def kinds(self) -> set[torch.dtype]:
        """The dtypes that occur."""
        return set(self.dtypes)

    @cached_property
    def types(self) -> set[type]:
        """The types that occur."""
        return set(self._types)

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
        """Return the code of each tensor's dtype, shape [len(self)]. ``codes``: never changes."""
        for known, numbers in self._codes:
            if known is codes:
                return numbers
        numbers = np.array([codes[dtype] for dtype in self.dtypes], dtype=np.int64)
        self._codes.append((codes, numbers))
        return numbers

    @cached_property
    def are_plain(self) -> bool:
        """Whether kernels can read all, as far as forms tell: see :func:`megascale.kernels.tensor_fault`."""
        negative, of_inference, _ = self._flags
        is_complex = any(dtype.is_complex for dtype in self.kinds)
        if not self.types <= PLAIN_TYPES or any(negative) or any(of_inference) or is_complex:
            return False
        return self.contiguous or not any(map(has_zero_strides, self.shapes, self.strides))

    def fit(self, other: "Forms") -> bool:
        """Return whether tensors have the shapes and devices of others."""
        if self._fitted is not other:
            if self.shapes != other.shapes or self._devices != other._devices:
                return False
            self._fitted = other
        return True

    def are_within(self, places: Places) -> bool:
        """Return whether the storages of tensors that lie at ``places`` hold all their elements."""
        itemsizes = np.array([dtype.itemsize for dtype in self.dtypes], dtype=np.int64)
        ends = (np.array(places.offsets, dtype=np.int64) + self._reaches) * itemsizes
        are_held = (ends <= np.array(places.nbytes, dtype=np.int64)) & (np.array(places.pointers, dtype=np.int64) != 0)
        return bool((are_held | (self.numels == 0)).all())

    @cached_property
    def _reaches(self) -> NDArray[np.int64]:
        """The distance from the first element to the last one, plus 1."""
        if self.contiguous:
            return self.numels
        every = zip(self.shapes, self.strides, strict=True)
        reaches = [sum((n - 1) * step for n, step in zip(*one, strict=True)) + 1 for one in every]
        return np.array(reaches, dtype=np.int64)


def has_zero_strides(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements of a tensor share memory, as in ``expand()``."""
    return any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True))


def picked(items: Sequence[T], indices: Sequence[int]) -> list[T]:
    """Return the items at ``indices``."""
    return list(itemgetter(*indices)(items)) if len(indices) > 1 else [items[index] for index in indices]


def rows(tensors: Sequence[Tensor]) -> list[tuple[Any, ...] | None]:
    """Return a row per tensor, equal as long as its place and its form are the same; None for what has none."""
    try:
        return list(zip(*Places.of(tensors)[:-1], *_read(tensors)[:-1], strict=True))  # all but requires_grad
    except UNREADABLE:
        return [None] if len(tensors) == 1 else [row for tensor in tensors for row in rows([tensor])]


def _read(tensors: Sequence[Tensor]) -> list[list[Any]]:
    return [list(map(look, tensors)) for look in _FORM]


def _guards(tensors: Sequence[Tensor], shapes: list[Any], strides: list[Any]) -> Any:
    """Return what tells in one call whether tensors still have these forms; None where torch has no such thing."""
    if TensorGuards is None:
        return None
    return TensorGuards(
        *tensors, dynamic_dims_sizes=list(map(_LIST, shapes)), dynamic_dims_strides=list(map(_LIST, strides))
    )


def _is_other(one: object, other: object) -> bool:
    return one is not other
