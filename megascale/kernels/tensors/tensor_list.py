"""Lists of tensors that cache addresses and forms: reading these dominates the cost of many small tensors."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels.tensors.forms import PLAIN_TYPES, UNREADABLE, Forms, Places, picked
from megascale.utils.cached import cached

_GRAD = attrgetter("grad")


class TensorList(Sequence[Tensor]):
    """Tensors of one step. Neither the list nor the tensors' memory changes while it is in use.

    Args:
        tensors: a list is used as it is, not copied.
        forms: of the tensors, where they are known; None: they are read when needed.
        pointers: the tensors' addresses, likewise.
    """

    def __init__(
        self, tensors: Iterable[Tensor] = (), forms: Forms | None = None, pointers: list[int] | None = None
    ) -> None:
        self.tensors: list[Tensor] = tensors if isinstance(tensors, list) else list(tensors)
        self._parts: Sequence[TensorList] = ()
        if forms is not None:
            self.forms = forms
        if pointers is not None:
            self.pointers = np.array(pointers, dtype=np.int64)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "TensorList":
        """Return ``tensors`` itself where it is one, else a new one."""
        return tensors if isinstance(tensors, TensorList) else cls(tensors)

    @classmethod
    def joined(cls, parts: "Sequence[TensorList]") -> "TensorList":
        """Return one list of several. Its parts share what it reads."""
        if len(parts) == 1:
            return parts[0]
        whole = cls([tensor for part in parts for tensor in part.tensors])
        if parts:
            whole.forms = Forms.joined([part.forms for part in parts])
            whole.pointers = np.concatenate([part.pointers for part in parts])
            whole._parts = parts
        return whole

    def pick(self, indices: Sequence[int]) -> "TensorList":
        """Return the tensors at ``indices``. What this list has read of them is not read again."""
        tensors = picked(self.tensors, indices)
        contiguous = self.forms.contiguous or all(map(Tensor.is_contiguous, tensors))
        chosen = TensorList(tensors, self.forms.pick(indices, contiguous=contiguous))
        chosen.pointers = self.pointers[list(indices)]
        return chosen

    @property
    def parts(self) -> "Sequence[TensorList]":
        """The lists that this one joins, in order; itself if it is not joined."""
        return self._parts or (self,)

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        return self.tensors[index]

    @cached
    def forms(self) -> Forms:
        """Shapes, strides, dtypes, devices and flags."""
        return Forms(self.tensors)

    @cached
    def pointers(self) -> NDArray[np.int64]:
        """Addresses, shape [len(self)]."""
        return np.fromiter(map(Tensor.data_ptr, self.tensors), np.int64, len(self.tensors))

    @cached
    def places(self) -> bytes:
        """A key of the tensors' addresses and devices."""
        return self.pointers.tobytes()

    @cached
    def signature(self) -> Hashable:
        """A key of the tensors' addresses and forms."""
        return self.places, self.forms.key

    def are_plain(self) -> bool:
        """Return whether kernels can read all: see :func:`megascale.kernels.tensor_fault`."""
        try:
            return self.forms.are_plain and self.forms.are_within(Places.of(self.tensors))
        except UNREADABLE:
            return False


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

    def read(self, tensors: list[Any]) -> TensorList | None:
        """Return ``tensors`` if kernels can read all of them, and if they fit. Else None.

        Each is a plain tensor then, as :mod:`megascale.kernels.tensors.checked_memory` says.
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
        return TensorList(tensors, forms, places.pointers)

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
        """Return the gradients, if every parameter has one of its shape and device that kernels can read. Else None."""
        return self._reader.read(list(map(_GRAD, self._params)))

    def read_some(self) -> tuple[list[int], TensorList] | None:
        """Return the indices of parameters with a gradient, and these gradients, if kernels can read all. Else None.

        A parameter stands in for its gradient where that is missing, so that the forms that are kept stay those of all.
        """
        grads = list(map(_GRAD, self._params))
        indices = [index for index, grad in enumerate(grads) if grad is not None]
        if not indices:
            return indices, TensorList()
        pairs = zip(grads, self._params, strict=True)
        whole = self._reader.read([param.detach() if grad is None else grad for grad, param in pairs])
        return None if whole is None else (indices, whole.pick(indices))


def are_grads(forms: Forms) -> bool:
    """Return whether plain tensors of these forms can be gradients."""
    return all(dtype.is_floating_point for dtype in forms.kinds)


def _are_grads_of(params: list[Tensor], forms: Forms) -> bool:
    return are_grads(forms) and forms.fit(Forms(params))
