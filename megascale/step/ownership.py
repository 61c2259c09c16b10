"""Records which optimizer wraps an inner optimizer and which updates a scaler: each has one owner at a time.

All references are weak: an optimizer that is garbage-collected frees both.
"""

import gc
from collections.abc import Collection
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch

from megascale.errors import ArgumentError, UsageError
from megascale.grad_scaler import MegatronGradScaler

_wrappers: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[torch.optim.Optimizer]] = WeakKeyDictionary()
_users: WeakKeyDictionary[MegatronGradScaler, WeakSet[torch.optim.Optimizer]] = WeakKeyDictionary()


def check_unwrapped(inner: torch.optim.Optimizer) -> None:
    """Raise ArgumentError if a live optimizer already wraps ``inner``: each would hold its own main params.

    A wrapper that only a reference cycle keeps counts as dropped.
    """
    if inner in _wrappers:
        gc.collect()
    wrapper = _wrappers[inner]() if inner in _wrappers else None
    if wrapper is not None:
        raise ArgumentError(
            f"optimizer ({type(inner).__name__}) is wrapped by a {type(wrapper).__name__} already, and two would keep "
            "two sets of main params for the same parameters; use that one, or drop it first (del, also of a schedule "
            "built on it)"
        )


def record(wrapper: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Remember, weakly, that ``wrapper`` wraps ``inner``."""
    _wrappers[inner] = ref(wrapper)


def record_user(wrapper: torch.optim.Optimizer, scaler: MegatronGradScaler) -> None:
    """Remember, weakly, that the steps of ``wrapper`` update ``scaler``."""
    _users.setdefault(scaler, WeakSet()).add(wrapper)


def scaler_conflict(
    scaler: MegatronGradScaler | None, stepping: Collection[torch.optim.Optimizer]
) -> UsageError | None:
    """Return an error if an optimizer that is not in ``stepping`` would update ``scaler`` too."""
    if scaler is None or scaler.may_be_shared:
        return None
    users = _users[scaler]
    if len(users) == len(stepping):
        return None
    gc.collect()
    for gone in [user for user in users if getattr(user, "grad_scaler", None) is not scaler]:
        users.discard(gone)
    others = [user for user in users if all(user is not one for one in stepping)]
    if not others:
        return None
    return UsageError(
        f"the grad scaler is shared with another {type(others[0]).__name__}, and each of its steps would update the "
        "scale that the other's loss was scaled by; step them as one with ChainedOptimizer([...]), or give each a "
        "scaler of its own (or delete the optimizer that you no longer use)"
    )
