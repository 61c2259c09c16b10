"""Who wrote a model param since we did: told from version counters and addresses, without reading an element."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels import ParamList, Room, TensorList, read_versions
from megascale.utils.dtensors import is_dtensor


class Watched:
    """Model params, and what changes when torch writes one in place, or one gets other storage."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params: list[Tensor] = list(params)
        self._plain = not any(map(is_dtensor, self.params))
        self._room = Room()

    @property
    def are_dtensors(self) -> bool:
        """Whether any of them is one."""
        return not self._plain

    def look(self, among: int | None = None) -> TensorList:
        """Return the memory of each, to be looked at as it is now: a ParamList where they are it themselves.

        Args:
            among: look in the way in which so many params are looked at; None: as many as they are.
        """
        kind = ParamList if self._plain else TensorList
        return kind(self._parts(), among, self._room)

    def versions(self) -> NDArray[np.int64]:
        """Return how often torch has written each by now."""
        return read_versions(self._parts())

    def requires_grad(self, look: TensorList) -> NDArray[np.int64]:
        """Return, for each, whether it requires grad. ``look``: what :meth:`look` returned."""
        return (look if self._plain else TensorList(self.params)).requires_grad

    def _parts(self) -> list[Tensor]:
        """Return the local memory of each."""
        return self.params if self._plain else [p._local_tensor if is_dtensor(p) else p for p in self.params]


class Watch:
    """Model params as they were when their main params were last rounded into them, or followed them.

    Args:
        params: taken as they are now.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._watched = Watched(params)
        now = self.look()
        # Copies: where there is one walk over the tensors, these are parts of its result.
        self._versions, self._pointers, self._forms = now.versions.copy(), now.pointers.copy(), now.forms.copy()

    def remember(self, place: int, other: "Watch", there: int) -> None:
        """Take the param at ``place`` as ``other`` remembers it."""
        self._versions[place] = other._versions[there]
        self._pointers[place] = other._pointers[there]
        if not self._forms.put(place, other._forms, there):
            self._pointers[place] = -1  # not to be compared: whoever asks finds it elsewhere

    def look(self) -> TensorList:
        """Return the memory of all params, as it is now."""
        return self._watched.look()

    def requires_grad(self, look: TensorList) -> NDArray[np.int64]:
        """Return, by place, whether a param requires grad."""
        return self._watched.requires_grad(look)

    def take(self, place: int) -> None:
        """Take one param as it is now."""
        now = Watched(self._watched.params[place : place + 1]).look(among=len(self._watched.params))
        self._versions[place : place + 1] = now.versions
        self._pointers[place : place + 1] = now.pointers
        self._forms.put(place, now.forms, 0)

    def take_written(self, places: slice | NDArray[np.int64], versions: NDArray[np.int64]) -> None:
        """Take the params at ``places``, written where they lie, as ``versions`` tells."""
        self._versions[places] = versions

    def moved(self, look: TensorList) -> bool:
        """Whether a param lies elsewhere, or something else lies there: of another shape, layout, dtype or device."""
        return bool((self._lies_elsewhere(look)).any())

    def written(self, look: TensorList) -> list[int]:
        """Return the places of params that others have written, or that have moved."""
        changed = (look.versions != self._versions) | self._lies_elsewhere(look)
        return np.flatnonzero(changed).tolist()

    def _lies_elsewhere(self, look: TensorList) -> NDArray[np.bool_]:
        return (look.pointers != self._pointers) | look.forms.differ(self._forms)
