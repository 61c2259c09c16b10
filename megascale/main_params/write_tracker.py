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

from collections.abc import Iterable, Mapping
from operator import attrgetter, gt
from typing import Any

from torch import Tensor

from megascale.kernels import Forms, Places, rows
from megascale.utils.dtensors import held, is_dtensor

# attrgetters, as map() then runs in C: at every step, over every parameter.
_VERSION = attrgetter("_version")
_REQUIRES_GRAD = attrgetter("requires_grad")


class WriteTracker:
    """Remembers model params as they were when they last agreed with their main params.

    Args:
        params: remembered as they are now.

    Attributes:
        requires_grad: by slot, whether a param required grad when :meth:`written` was called last.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params: list[Tensor] = list(params)
        self._are_dtensors = any(map(is_dtensor, self._params))
        parts = self._parts()
        self._versions = self._read_versions(self._params)
        self._rows = rows(parts)
        self.requires_grad = self._read_flags()
        self._same: tuple[Forms, Places] | None = None  # all places and forms, where they were those of the rows

    def remember(self, slot: int, other: "WriteTracker", other_slot: int) -> None:
        """Copy what ``other`` remembers of its param at ``other_slot`` to ``slot``."""
        self._versions[slot], self._rows[slot] = other._versions[other_slot], other._rows[other_slot]
        self._same = None

    def take(self, slot: int) -> None:
        """Remember one param as it is now."""
        param = self._params[slot]
        [self._versions[slot]] = self._read_versions([param])
        [row] = rows([held(param)])
        if row != self._rows[slot]:
            self._rows[slot], self._same = row, None

    def take_written(self, slots: list[int]) -> None:
        """Remember the present versions of the params in ``slots``, which were written in place."""
        if len(slots) == len(self._params):  # in their order, as one group has them
            self._versions = self._read_versions(self._params)
            return
        for slot, version in zip(slots, self._read_versions([self._params[slot] for slot in slots]), strict=True):
            self._versions[slot] = version

    def moved(self) -> bool:
        """Whether a param's address, shape, layout, dtype or device has changed."""
        return rows(self._parts()) != self._rows

    def is_written(self, slot: int) -> bool:
        """Return whether others have written the param in ``slot``, or it has moved."""
        return self.has_new_version(slot) or rows([held(self._params[slot])]) != [self._rows[slot]]

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

    def written(self) -> list[int]:
        """Return the slots of params that others have written, or that have moved."""
        parts = self._parts()
        versions = self._read_versions(self._params)
        if self._same is not None:
            forms, places = self._same
            if forms.places(parts, places.asked) != places:
                self._same = None
        if self._are_dtensors or self._same is None:
            self.requires_grad = self._read_flags()  # of other parts it is known: forms have it
        if self._same is not None and versions == self._versions:
            return []
        now = rows(parts)
        every = zip(versions, self._versions, now, self._rows, strict=True)
        found = [slot for slot, (version, known, row, before) in enumerate(every) if version != known or row != before]
        if now == self._rows and None not in now:
            self._same = Forms(parts), Places.once_per_storage(parts)
        return found

    def _read_flags(self) -> list[bool]:
        return list(map(_REQUIRES_GRAD, self._params))

    def _parts(self) -> list[Tensor]:
        """Return the local tensor of each."""
        return list(map(held, self._params)) if self._are_dtensors else self._params

    def _read_versions(self, params: list[Tensor]) -> list[Any]:
        """Return what changes with every write to a param.

        Torch counts a write to a DTensor, as ``load_state_dict()`` makes, in the DTensor, and a write to its local
        tensor, as our kernels make, in that.
        """
        versions = list(map(_VERSION, params))
        return list(zip(versions, map(_VERSION, map(held, params)), strict=True)) if self._are_dtensors else versions


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
        self._versions = self._read()

    def written(self) -> list[str]:
        """Return the names of params that were written since. Torch has counted the write."""
        now = self._read()
        if now == self._versions:
            return []
        return [
            name for name, version, before in zip(self._params, now, self._versions, strict=True) if version != before
        ]

    def _read(self) -> list[tuple[int, int]]:
        params = self._params.values()
        return list(zip(map(_VERSION, params), map(_VERSION, map(held, params)), strict=True))
