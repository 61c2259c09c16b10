"""The forms of an optimizer's tensors are kept from call to call, as a step of the core keeps those of gradients.

No tensor is kept: the optimizer is its user's, who may drop its gradients and state, or move them, at any time.
"""

from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

import torch

from megascale.kernels import Forms, ListReader

_readers: WeakKeyDictionary[torch.optim.Optimizer, dict[Hashable, ListReader]] = WeakKeyDictionary()


def reader_of(optimizer: torch.optim.Optimizer, key: Hashable, fits: Callable[[Forms], bool]) -> ListReader:
    """Return the reader of a list of tensors of ``optimizer``, the same one in every call.

    Args:
        optimizer: its tensors.
        key: of the list among those of the optimizer.
        fits: see :class:`megascale.kernels.ListReader`; always the same for one key.
    """
    readers = _readers.get(optimizer)
    if readers is None:
        readers = _readers[optimizer] = {}
    known = readers.get(key)
    if known is None:
        known = readers[key] = ListReader(fits)
    return known
