"""Addresses of gradients, on the device: a column that the kernels of a step share, beside their tables.

A missing gradient has address 0, an empty one address 1.
"""

from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor

from megascale.kernels.tensors.tensor_list import TensorList
from megascale.kernels.triton.device_table import copied, refuse_capture
from megascale.utils.transfer import is_capturing

CACHE_BYTES = 1 << 23  # columns beyond that are dropped, least recently used first


class GradAddresses:
    """A cache of columns by their addresses: nothing is copied for gradients at addresses that were used before.

    For gradients that have moved, the statistics and the update of a step share one copy.
    """

    def __init__(self) -> None:
        self._columns: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._nbytes = 0
        self._captured: dict[Hashable, Tensor] = {}

    def find(self, grads: TensorList) -> Tensor:
        """Return the addresses on the device: int64, shape [len(grads)].

        Raises UsageError if they are not there yet while a graph is captured.
        """
        device = grads.filled[0].device
        capturing = is_capturing(device)
        key = device, grads.places
        found = self._captured.get(key)
        if found is not None:
            return found
        found = self._columns.get(key)
        if found is None:
            refuse_capture(device, capturing)
            found = copied(grads.addresses, device)
            self._keep(key, found)
            if grads.parts:  # they are updated one after the other
                pieces = found.split([len(part) for part in grads.parts])
                for part, piece in zip(grads.parts, pieces, strict=True):
                    self._keep((device, part.places), piece)
        elif capturing:
            self._captured[key] = found  # replays read it for as long as the graph lives
        else:
            self._columns.move_to_end(key)
        return found

    def _keep(self, key: Hashable, addresses: Tensor) -> None:
        replaced = self._columns.pop(key, None)
        if replaced is not None:
            self._nbytes -= replaced.nbytes
        self._columns[key] = addresses
        self._nbytes += addresses.nbytes
        while self._nbytes > CACHE_BYTES and len(self._columns) > 2:
            _, dropped = self._columns.popitem(last=False)
            self._nbytes -= dropped.nbytes
