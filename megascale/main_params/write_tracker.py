"""Detects writes to model params from ``_version`` and ``data_ptr()``, without reading an element."""

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels import ParamList, Room, TensorList, read_versions
from megascale.utils.dtensors import held, is_dtensor


class TrackedParams:
    """Model params, with the versions and addresses that change when one is written or gets other storage."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params: list[Tensor] = list(params)
        self._plain = not any(map(is_dtensor, self.params))
        self._room = Room()

    @property
    def are_dtensors(self) -> bool:
        """Whether any of the params is a DTensor."""
        return not self._plain

    def snapshot(self, among: int | None = None) -> TensorList:
        """Return the memory of each param, to compare with an earlier snapshot; a ParamList if none is a DTensor.

        Args:
            among: choose the way of reading (one walk, or one by one) for this number of params; None: for their own
                number.
        """
        kind = ParamList if self._plain else TensorList
        return kind(self._parts(), among, self._room)

    def versions(self, snapshot: TensorList | None = None) -> NDArray[np.int64]:
        """Return a number for each that changes with every write.

        Torch counts a write to a DTensor, as ``load_state_dict()`` makes, in the DTensor, and a write to its local
        tensor, as our kernels make, in that. ``snapshot``: what :meth:`snapshot` returned; None: read them again.
        """
        of_parts = read_versions(self._parts()) if snapshot is None else snapshot.versions
        return of_parts if self._plain else of_parts + (read_versions(self.params) << 32)

    def requires_grad(self, snapshot: TensorList) -> NDArray[np.int64]:
        """Return, for each, whether it requires grad. ``snapshot``: what :meth:`snapshot` returned."""
        return (snapshot if self._plain else TensorList(self.params)).requires_grad

    def _parts(self) -> list[Tensor]:
        """Return the local tensor of each."""
        return self.params if self._plain else list(map(held, self.params))


class WriteTracker:
    """Remembers model params as they were when they last agreed with their main params.

    Args:
        params: remembered as they are now.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._tracked = TrackedParams(params)
        now = self.snapshot()
        # Copies, as these may be parts of one walk's whole result.
        self._versions = self._tracked.versions(now).copy()
        self._pointers, self._forms = now.pointers.copy(), now.forms.copy()
        self._memory = _Memory()

    def remember(self, slot: int, other: "WriteTracker", other_slot: int) -> None:
        """Copy what ``other`` remembers of its param at ``other_slot`` to ``slot``."""
        self._memory = _Memory()
        self._versions[slot] = other._versions[other_slot]
        self._pointers[slot] = other._pointers[other_slot]
        if not self._forms.put(slot, other._forms, other_slot):
            self._pointers[slot] = -1  # equal to no address, so that the param counts as moved

    def snapshot(self) -> TensorList:
        """Return the memory of all params, as it is now."""
        return self._tracked.snapshot()

    def requires_grad(self, snapshot: TensorList) -> NDArray[np.int64]:
        """Return, by slot, whether a param requires grad."""
        return self._tracked.requires_grad(snapshot)

    def take(self, slot: int) -> None:
        """Remember one param as it is now."""
        param = TrackedParams(self._tracked.params[slot : slot + 1])
        now = param.snapshot(among=len(self._tracked.params))
        self._memory = _Memory()
        self._versions[slot : slot + 1] = param.versions(now)
        self._pointers[slot : slot + 1] = now.pointers
        self._forms.put(slot, now.forms, 0)

    def take_written(self, slots: slice | NDArray[np.int64], versions: NDArray[np.int64]) -> None:
        """Remember the new ``versions`` of the params in ``slots``, which were written in place."""
        self._versions[slots] = versions

    def moved(self, snapshot: TensorList) -> bool:
        """Whether a param's address, shape, layout, dtype or device has changed."""
        return bool((self._has_moved(snapshot)).any())

    def written(self, snapshot: TensorList) -> list[int]:
        """Return the slots of params that others have written, or that have moved."""
        changed = (self._tracked.versions(snapshot) != self._versions) | self._has_moved(snapshot)
        found: list[int] = changed.nonzero()[0].tolist()
        return found

    def _has_moved(self, snapshot: TensorList) -> NDArray[np.bool_]:
        found = snapshot.findings(self._memory)
        if "moved" not in found:
            found["moved"] = (snapshot.pointers != self._pointers) | snapshot.forms.differ(self._forms)
        return cast("NDArray[np.bool_]", found["moved"])


class _Memory:
    """Identifies the addresses and forms that a tracker remembers: replaced when any of them changes."""
