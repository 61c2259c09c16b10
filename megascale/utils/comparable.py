"""One form for equal options, whose ``repr`` says the value: what ranks compare of them.

Compared by value is all that a state dict can hold (:mod:`megascale.utils.portable`), tensors where they are in host
memory: the host waits for no device. Of a device its type is compared, as each rank has one of its own, and of anything
else its class: a first step refuses it.
"""

import numbers
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from megascale.utils.portable import plain


def comparable(value: Any) -> Any:
    """Return ``value`` in the form that equal ones share: a number, a word, a dtype, None, or a tuple or dict of
    such.
    """
    value = plain(value)
    if value is None or isinstance(value, str | torch.dtype):
        return value
    if isinstance(value, numbers.Real):
        return float(value) + 0.0  # -0.0 becomes 0.0
    if isinstance(value, tuple | list):
        return tuple(map(comparable, value))
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return number_in(value)
        array, told = _read(value), f"a tensor of shape {tuple(value.shape)} on {value.device.type}"
        return told if array is None else f"{told} of digest {blake2b(array.tobytes(), digest_size=8).hexdigest()}"
    if isinstance(value, Mapping):
        pairs = [(repr(comparable(key)), comparable(own)) for key, own in value.items()]
        return dict(sorted(pairs, key=lambda pair: pair[0]))
    if isinstance(value, torch.device):
        return f"a device of type {value.type}"
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"


def number_in(value: Tensor) -> float | str:
    """Return the number that a tensor holds in host memory; else where it is, as the host must not wait."""
    numbers = _read(value)
    if numbers is None or value.numel() != 1:
        return f"a tensor on {value.device.type}"
    return float(numbers.reshape(()))


def _read(value: Tensor) -> Any:
    """Return a tensor's values exactly, as an array; None where they are not in host memory."""
    if value.device.type != "cpu":
        return None
    try:
        return value.detach().to(torch.complex128 if value.is_complex() else torch.float64).numpy()
    except (RuntimeError, TypeError):  # a tensor without memory of its own, such as a fake one
        return None
