"""Write tracking: detects writes to model params from ``_version`` and ``data_ptr()``, without reading an element.

**What goes wrong without it.** A main param is the truth, and a step rounds it into its model param. If somebody writes
the model param in between, as ``load_state_dict()``, an initializer or ``param.data = ...`` does, the next step rounds
the old main param over it: the loaded weights are gone, and nothing failed.

**What is remembered.** Of each model param the version counter, which torch raises at every write in place, and a row:
address, shape, strides, dtype and device, which differ where ``param.data`` was replaced. Comparing elements instead
would read the whole model in each step. A write that raises no version, as through
``numpy()`` or ``param.data``, is not seen: for those there is ``reload_model_params()``.

**Who writes.** The update writes model params, too, and raises their versions, by torch or by ``increment_version``.
How often depends on the backend, so nobody predicts a version: after each update :meth:`WriteTracker.take_written`
reads the versions as they are. It must follow the write at once: a write of the caller's in between would count as the
update's, and be rounded over in the next step.

**In which order.** Versions are compared before a step measures anything. A param that has only another version is
taken over into its main param. One that has moved is checked first (two params may share memory now), and all units are
built anew, because their tables hold addresses. Only then are its values taken.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, gt
from typing import Any

import torch
from torch import Tensor

from megascale.kernels import LOOKS, UNREADABLE, Forms, ListReader
from megascale.utils.dtensors import all_held, held, is_dtensor

# attrgetters, as map() then runs in C: at every step, over every parameter.
_VERSION = attrgetter("_version")
_REQUIRES_GRAD = attrgetter("requires_grad")


class WriteTracker:
    """Remembers model params as they were when they last agreed with their main params.

    Args:
        params: remembered as they are now.

    Attributes:
        requires_grad: by slot, whether a param required grad when :meth:`moved` or :meth:`written` was called last.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params: list[Tensor] = list(params)
        self._are_dtensors = any(map(is_dtensor, self._params))
        self._versions = self._read_versions(self._params)
        self._rows = [_row(held(param)) for param in self._params]
        self.requires_grad = list(map(_REQUIRES_GRAD, self._params))
        self._reader = ListReader()
        self._seen: tuple[Forms, bytes] | None = None  # forms and addresses of all, where they were those of the rows

    def remember(self, slot: int, other: "WriteTracker", other_slot: int) -> None:
        """Copy what ``other`` remembers of its param at ``other_slot`` to ``slot``."""
        version = other._versions[other_slot]
        if self._are_dtensors != other._are_dtensors:  # of a plain param, whose version is read twice among DTensors
            version = (version, version) if self._are_dtensors else version[0]
        self._versions[slot], self._rows[slot] = version, other._rows[other_slot]
        self._seen = None

    def take(self, slot: int) -> None:
        """Remember one param as it is now."""
        [self._versions[slot]] = self._read_versions([self._params[slot]])
        row = _row(held(self._params[slot]))
        if row != self._rows[slot]:
            self._rows[slot], self._seen = row, None

    def take_written(self, slots: list[int]) -> None:
        """Remember the present versions of the params in ``slots``, which were written in place."""
        if len(slots) == len(self._params):  # in their order, as one group has them
            self._versions = self._read_versions(self._params)
            return
        for slot, version in zip(slots, self._read_versions([self._params[slot] for slot in slots]), strict=True):
            self._versions[slot] = version

    def moved(self) -> list[int]:
        """Return the slots of params whose address, shape, layout, dtype or device has changed."""
        parts = all_held(self._params) if self._are_dtensors else self._params
        try:
            addresses = self._reader.addresses(parts).tobytes()
            seen = self._reader.forms, addresses
        except UNREADABLE:  # then they are compared one by one
            seen = None
        if seen is None or self._are_dtensors:
            self.requires_grad = list(map(_REQUIRES_GRAD, self._params))
        else:
            self.requires_grad = seen[0].requires_grad
        if seen is not None and seen == self._seen:
            return []
        found = [slot for slot, (part, row) in enumerate(zip(parts, self._rows, strict=True)) if _row(part) != row]
        self._seen = None if found else seen
        return found

    def written(self) -> list[int]:
        """Return the slots of params that others have written, or that have moved."""
        found, versions = self.moved(), self._read_versions(self._params)
        if versions == self._versions:
            return found
        every = enumerate(zip(versions, self._versions, strict=True))
        return sorted({*found, *(slot for slot, (version, before) in every if version != before)})

    def is_written(self, slot: int) -> bool:
        """Return whether others have written the param in ``slot``, or it has moved."""
        return self.has_new_version(slot) or _row(held(self._params[slot])) != self._rows[slot]

    def has_new_version(self, slot: int) -> bool:
        """Return whether torch has counted a write by others into the param in ``slot``. Moving it is none.

        A version that is lower than before belongs to another tensor: FSDP2 puts one into the DTensor at every
        ``module.to()``, of the same elements.
        """
        [now], before = self._read_versions([self._params[slot]]), self._versions[slot]
        return any(map(gt, now, before)) if self._are_dtensors else now > before

    def have_new_versions(self) -> bool:
        """Whether torch has counted a write by others into any param."""
        return self._read_versions(self._params) != self._versions

    def _read_versions(self, params: Sequence[Tensor]) -> list[Any]:
        """Return what changes with every write to a param."""
        return versions_of(params) if self._are_dtensors else list(map(_VERSION, params))


class WriteWatch:
    """Tells which params are written while values that will replace theirs are on their way.

    Reads all versions twice per step: when the values leave and when they have arrived. The tracker's cannot stand for
    the first: it reads them before or after the values leave, and later calls take writes over into it, so that a write
    meanwhile would be known there and not be named.

    Args:
        params: by name.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._versions = versions_of(params.values())

    def written(self) -> list[str]:
        """Return the names of params that were written since. Torch has counted the write."""
        now = versions_of(self._params.values())
        if now == self._versions:
            return []
        every = zip(self._params, now, self._versions, strict=True)
        return [name for name, version, before in every if version != before]


def versions_of(params: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return what changes with every write to each param.

    Torch counts a write to a DTensor, as ``load_state_dict()`` makes, in the DTensor, and a write to its local tensor,
    as our kernels make, in that.
    """
    params = list(params)
    # A subclass is asked by __torch_function__ whenever an attribute is read, which takes longer than the reading does.
    with torch._C.DisableTorchFunctionSubclass():
        return list(zip(map(_VERSION, params), map(_VERSION, all_held(params)), strict=True))


def _row(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what is equal as long as a tensor's place and its form are the same; None for what has none."""
    try:
        return (tensor.data_ptr(), *(look(tensor) for look in LOOKS[:-1]))  # all but requires_grad
    except UNREADABLE:
        return None
