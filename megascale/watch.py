"""Who wrote a model param since we did: told from version counters and addresses, without reading an element."""

from collections.abc import Iterable, Sequence
from operator import attrgetter, ne

from torch import Tensor, nn

from megascale.dtensors import is_dtensor

# Called for every parameter at every step, in loops that run in C.
_VERSION = attrgetter("_version")


class Watched(list[nn.Parameter]):
    """Model params, and what changes when torch writes one in place, or one gets other storage."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params)
        self._plain = not any(map(is_dtensor, self))

    def versions(self) -> list[int]:
        """Return how often torch has written each."""
        return list(map(_VERSION, self._parts()))

    def pointers(self) -> list[int]:
        """Return where each lies."""
        return list(map(Tensor.data_ptr, self._parts()))

    def _parts(self) -> Sequence[Tensor]:
        return self if self._plain else [p._local_tensor if is_dtensor(p) else p for p in self]


class Watch:
    """Model params as they were when their main params were last rounded into them, or followed them.

    Args:
        params: taken as they are now.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.params = Watched(params)
        self._versions = self.params.versions()
        self._pointers = self.params.pointers()

    @classmethod
    def joined(cls, places: Iterable[tuple["Watch", int]]) -> "Watch":
        """Return a watch over the params at ``places`` of others, as these remember them."""
        made = cls([])
        parts = list(places)
        made.params = Watched(watch.params[place] for watch, place in parts)
        made._versions = [watch._versions[place] for watch, place in parts]
        made._pointers = [watch._pointers[place] for watch, place in parts]
        return made

    def take(self, place: int) -> None:
        """Take one param as it is now."""
        [self._versions[place]] = Watched([self.params[place]]).versions()
        [self._pointers[place]] = Watched([self.params[place]]).pointers()

    def take_written(self, places: Sequence[int], versions: Sequence[int]) -> None:
        """Take the params at ``places``, written where they lie, as ``versions`` tells."""
        for place, version in zip(places, versions, strict=True):
            self._versions[place] = version

    def moved(self) -> bool:
        """Whether a param lies elsewhere."""
        return self.params.pointers() != self._pointers

    def written(self) -> list[int]:
        """Return the places of params that others have written, or that lie elsewhere."""
        versions, pointers = self.params.versions(), self.params.pointers()
        if versions == self._versions and pointers == self._pointers:
            return []
        changed = zip(map(ne, versions, self._versions), map(ne, pointers, self._pointers), strict=True)
        return [place for place, (rewritten, elsewhere) in enumerate(changed) if rewritten or elsewhere]
