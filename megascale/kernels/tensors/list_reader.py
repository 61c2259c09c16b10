"""ListReader: reads where many tensors lie, in every step, and compares their forms with those of the step before.

Whatever is read costs some 50 ns per tensor, and twice as much where the processor's own cache no longer holds the
tensor. So a list is read in blocks: torch compares all parts of a form in one call, a guard, and the address follows
while the tensor is in the cache. The size of a storage is read only where a tensor lies at another address than before.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from megascale.kernels.tensors.forms import LOOKS, PLAIN_TYPES, Forms
from megascale.kernels.tensors.tensor_list import TensorList

UNREADABLE = (RuntimeError, TypeError, AttributeError)
"""What reading raises for something that is no tensor, or has no memory or strides of its own, as a sparse tensor."""

BLOCK = 256
"""Tensors that are read together: what torch keeps of them, half a KiB each, stays in the processor's cache."""


class ListReader:
    """Reads a list of plain tensors in every step. They may be others in every step; none is kept alive.

    Attributes:
        forms: of the tensors that were read last.
    """

    def __init__(self) -> None:
        self.forms = Forms([])
        self._guards: dict[int, Any] = {}
        self._whole: NDArray[np.int64] | None = None  # addresses at which tensors of these forms had all their memory

    def addresses(self, tensors: list[Any]) -> NDArray[np.int64]:
        """Return where tensors lie, shape [len(tensors)]; :attr:`forms` are theirs then.

        Raises one of :data:`UNREADABLE` if one is no plain tensor, or has no address.
        """
        found: list[int] = []
        if len(tensors) != len(self.forms.shapes):
            self._read_forms(tensors)
        for start in range(0, len(tensors), BLOCK):
            block, known = tensors[start : start + BLOCK], self._guards.get(start)
            # Guards say no, too, in another context than that of their construction, as under autocast.
            if (known is None or not known.check(*block)) and not self._has_forms(start, block):
                self._read_forms(tensors)
            found.extend(map(Tensor.data_ptr, block))
        return np.array(found, dtype=np.int64)

    def _has_forms(self, start: int, block: list[Any]) -> bool:
        """Return whether tensors have the forms from index ``start`` on, and let guards tell so from now on."""
        part = slice(start, start + len(block))
        if any(list(map(look, block)) != column[part] for look, column in zip(LOOKS, self.forms.columns, strict=True)):
            return False
        sizes, strides = (  # torch's stub has another type for them
            cast("Any", list(map(list, column[part]))) for column in (self.forms.shapes, self.forms.strides)
        )
        self._guards[start] = TensorGuards(*block, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return True

    def _read_forms(self, tensors: list[Any]) -> None:
        if not PLAIN_TYPES.issuperset(map(type, tensors)):  # a wrapper may answer in its own code
            raise TypeError("not all of these are plain tensors")
        self.forms, self._guards, self._whole = Forms(tensors), {}, None

    def read(self, tensors: list[Any], filled: list[Any] | None = None) -> TensorList | None:
        """Return ``tensors`` if kernels can read all: see :mod:`megascale.kernels.tensors.faults`. Else None.

        ``filled``: where some are missing, a list in which others stand in for these.
        """
        every = tensors if filled is None else filled
        try:
            addresses = self.addresses(every)  # first: it forgets the others where a form has changed
            before, self._whole = self._whole, None
            moved = np.arange(len(every)) if before is None else np.flatnonzero(addresses != before)
            if not self.forms.are_plain:
                return None
            if len(moved) and not self.forms.are_whole(every, addresses, moved):
                return None
        except UNREADABLE:
            return None
        self._whole = addresses
        return TensorList(tensors, self.forms, addresses, filled=every)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_guards": {}}  # they cannot be copied
