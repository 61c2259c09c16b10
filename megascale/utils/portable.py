"""What a state dict may hold: tensors, and plain values that ``torch.load(weights_only=True)`` reads."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megascale.errors import StateDictError
from megascale.utils.autograd import detached

PRIMITIVES = (bool, int, float, str, type(None))
LEAVES = (*PRIMITIVES, torch.dtype, torch.device)
"""The types of a state dict's values besides tensors, and dicts, lists and tuples of all these."""

NO_OPTIONS = ("params", "param_names")
"""The keys of a param group that are no options."""


def plain(value: Any) -> Any:
    """Return the bool, int, float or str that ``value`` is beside its own type: numpy's numbers, enums. Else itself."""
    if type(value) in LEAVES:
        return value
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum is its name
    return next((base(value) for base in (bool, int, float) if isinstance(value, base)), value)


def portable(value: Any, where: str, *, copy: bool) -> Any:
    """Return ``value`` as tensors and :data:`LEAVES`, tensors detached and, with ``copy``, cloned.

    Numbers of numpy and members of enums become Python's own, and named tuples become tuples: ``torch.load`` with
    ``weights_only=True`` refuses their classes.

    Raises StateDictError naming ``where`` for anything else that it could not read.
    """
    if isinstance(value, Tensor):
        return detached(value).clone() if copy else detached(value)
    value = plain(value)
    if isinstance(value, LEAVES):
        return value
    if isinstance(value, (list, tuple)):
        items = [portable(item, f"{where}[{i}]", copy=copy) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(plain(key), PRIMITIVES)]:
            raise StateDictError(
                f"{where} has the key {odd[0]!r}, of a type that a state dict cannot hold; keep keys that are strings "
                "or numbers there"
            )
        return {plain(key): portable(item, f"{where}[{key!r}]", copy=copy) for key, item in value.items()}
    raise StateDictError(
        f"{where} is a {type(value).__name__}, which a state dict cannot hold; keep tensors, numbers, strings, dtypes "
        "and devices there"
    )
