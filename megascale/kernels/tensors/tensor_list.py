"""Lists of tensors that cache addresses and forms: reading these dominates the cost of many small tensors."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels.tensors.forms import PLAIN_TYPES, UNREADABLE, Forms, Places, picked

T = TypeVar("T")

_GRAD = attrgetter("grad")


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
        parts: the lists that this one joins, in order.
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

    @classmethod
    def joined(cls, parts: "Sequence[TensorList]") -> "TensorList":
        """Return one list of several. Its parts share what it reads."""
        if len(parts) == 1:
            return parts[0]
        whole = cls(chain.from_iterable(parts), filled=[one for part in parts for one in part.filled])
        if parts:
            whole.forms = Forms.joined([part.forms for part in parts])
            whole.pointers = np.concatenate([part.pointers for part in parts])
            whole.parts = parts
        return whole

    def pick(self, indices: Sequence[int]) -> "TensorList":
        """Return the tensors at ``indices``. What this list has read of them is not read again."""
        filled = picked(self.filled, indices)
        contiguous = self.forms.contiguous or all(map(Tensor.is_contiguous, filled))
        forms = self.forms.pick(indices, contiguous=contiguous)
        return TensorList(picked(self.tensors, indices), forms, self.pointers[list(indices)], filled)

    @cached_property
    def there(self) -> list[int]:
        """The indices of those that are not missing."""
        return [index for index, tensor in enumerate(self.tensors) if tensor is not None]

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
        return [self.tensors[self.there[0]] if one is None else one for one in self.tensors]

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

    @cached_property
    def signature(self) -> Hashable:
        """A key of the tensors' addresses and forms."""
        return self.places, self.forms.key


class ListReader:
    """Reads a list of tensors in every step. Their forms, which are usually those of the step before, are kept.

    The tensors may be others in every step. None is kept alive.

    Args:
        fits: tells from the forms of plain tensors whether they are such as kernels are to read here.
    """

    def __init__(self, fits: Callable[[Forms], bool]) -> None:
        self._fits = fits
        self._forms: Forms | None = None
        self._places: Places | None = None  # of the newest tensors of these forms

    def read(self, tensors: list[Any], some: list[Any] | None = None) -> TensorList | None:
        """Return ``tensors`` if kernels can read all of them, and if they fit. Else None.

        Each is a plain tensor then, as :mod:`megascale.kernels.tensors.checked_memory` says.

        ``some``: the list to return, in which some are missing: the others of ``tensors`` stand in for these.
        """
        forms, before = self._forms, self._places
        places = None if forms is None else forms.places(tensors)
        if forms is None or places is None:
            if not PLAIN_TYPES.issuperset(map(type, tensors)):  # a wrapper may answer in its own code
                return None
            self._forms = self._places = before = None
            found = self._usable(tensors)
            if found is None:
                return None
            forms, places = found
        self._forms, self._places = forms, places
        # Tensors that lie elsewhere, but at the same places of storages of the same sizes, fit in these.
        are_alike = before is not None and before[1:] == places[1:] and all(places.pointers)
        if not (are_alike or forms.are_within(places)):
            self._places = None
            return None
        pointers = np.array(places.pointers, dtype=np.int64)
        return TensorList(tensors if some is None else some, forms, pointers, filled=tensors)

    def _usable(self, tensors: list[Any]) -> tuple[Forms, Places] | None:
        """Return the forms and places of plain tensors that kernels can read, as far as forms tell."""
        try:
            forms = Forms(tensors)
            return (forms, Places.of(tensors)) if forms.are_plain and self._fits(forms) else None
        except UNREADABLE:  # no memory that an address tells
            return None


class GradReader:
    """Reads the gradients of some parameters in every step.

    Args:
        params: their shapes and devices stay what they are.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params
        self._reader = ListReader(partial(_are_grads_of, params))

    def read(self) -> TensorList | None:
        """Return the gradients, if each that is there has its parameter's shape and device, and kernels can read it.

        Else None. A parameter stands in for its gradient where that is missing.
        """
        grads: list[Any] = list(map(_GRAD, self._params))
        pairs = zip(grads, self._params, strict=True)
        return self._reader.read([param.detach() if grad is None else grad for grad, param in pairs], grads)


def are_grads(forms: Forms) -> bool:
    """Return whether plain tensors of these forms can be gradients."""
    return all(dtype.is_floating_point for dtype in forms.kinds)


def _are_grads_of(params: list[Tensor], forms: Forms) -> bool:
    return are_grads(forms) and forms.fit(Forms(params))
