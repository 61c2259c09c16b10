"""Detects writes to model params from ``_version`` and ``data_ptr()``, without reading an element."""

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels import ParamList, Room, TensorList, read_versions
from megascale.utils.dtensors import is_dtensor


class TrackedParams:
    """Model params, and what changes when torch writes one in place, or one gets other storage."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params: list[Tensor] = list(params)
        self._plain = not any(map(is_dtensor, self.params))
        self._room = Room()

    @property
    def are_dtensors(self) -> bool:
        """Whether any of them is one."""
        return not self._plain

    def snapshot(self, among: int | None = None) -> TensorList:
        """Return the memory of each, to be compared with an earlier one: a ParamList where they are it themselves.

        Args:
            among: read them as that many params would be read, in one walk or one by one; None: as many as there are.
        """
        kind = ParamList if self._plain else TensorList
        return kind(self._parts(), among, self._room)

    def versions(self) -> NDArray[np.int64]:
        """Return how often torch has written each by now."""
        return read_versions(self._parts())

    def requires_grad(self, snapshot: TensorList) -> NDArray[np.int64]:
        """Return, for each, whether it requires grad. ``snapshot``: what :meth:`snapshot` returned."""
        return (snapshot if self._plain else TensorList(self.params)).requires_grad

    def _parts(self) -> list[Tensor]:
        """Return the local memory of each."""
        return self.params if self._plain else [p._local_tensor if is_dtensor(p) else p for p in self.params]


class WriteTracker:
    """Model params as they were when their main params were last rounded into them, or followed them.

    Args:
        params: taken as they are now.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._tracked = TrackedParams(params)
        now = self.snapshot()
        # Copies: where there is one walk over the tensors, these are parts of its result.
        self._versions, self._pointers, self._forms = now.versions.copy(), now.pointers.copy(), now.forms.copy()
        self._lie = _Lie()

    def remember(self, slot: int, other: "WriteTracker", other_slot: int) -> None:
        """Take the param at ``slot`` as ``other`` remembers it."""
        self._lie = _Lie()
        self._versions[slot] = other._versions[other_slot]
        self._pointers[slot] = other._pointers[other_slot]
        if not self._forms.put(slot, other._forms, other_slot):
            self._pointers[slot] = -1  # not to be compared: whoever asks finds it elsewhere

    def snapshot(self) -> TensorList:
        """Return the memory of all params, as it is now."""
        return self._tracked.snapshot()

    def requires_grad(self, snapshot: TensorList) -> NDArray[np.int64]:
        """Return, by slot, whether a param requires grad."""
        return self._tracked.requires_grad(snapshot)

    def take(self, slot: int) -> None:
        """Take one param as it is now."""
        now = TrackedParams(self._tracked.params[slot : slot + 1]).snapshot(among=len(self._tracked.params))
        self._lie = _Lie()
        self._versions[slot : slot + 1] = now.versions
        self._pointers[slot : slot + 1] = now.pointers
        self._forms.put(slot, now.forms, 0)

    def take_written(self, slots: slice | NDArray[np.int64], versions: NDArray[np.int64]) -> None:
        """Take the params in ``slots``, written where they lie, as ``versions`` tells."""
        self._versions[slots] = versions

    def moved(self, snapshot: TensorList) -> bool:
        """Whether a param lies elsewhere, or something else lies there: of another shape, layout, dtype or device."""
        return bool((self._lies_elsewhere(snapshot)).any())

    def written(self, snapshot: TensorList) -> list[int]:
        """Return the slots of params that others have written, or that have moved."""
        changed = (snapshot.versions != self._versions) | self._lies_elsewhere(snapshot)
        return np.flatnonzero(changed).tolist()

    def _lies_elsewhere(self, snapshot: TensorList) -> NDArray[np.bool_]:
        found = snapshot.findings(self._lie)
        if "elsewhere" not in found:
            found["elsewhere"] = (snapshot.pointers != self._pointers) | snapshot.forms.differ(self._forms)
        return cast("NDArray[np.bool_]", found["elsewhere"])


class _Lie:
    """Stands for where a tracker's params lie, and what lies there: another one as soon as that is something else."""
