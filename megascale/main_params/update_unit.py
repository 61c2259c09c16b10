"""Main params that are updated in one go."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megascale.kernels import GradList, ParamList, TensorList
from megascale.main_params.main_param import MainParam
from megascale.main_params.write_tracker import TrackedParams

SLICE = 1 << 24
"""Elements, about, that are updated in host memory before their weights travel."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class UpdateUnit:
    """Main params that one kernel call updates. The same object is kept, for caches, until params or memory change.

    Attributes:
        group: the index of their param group.
        params: in the order of the update.
        models: their model params.
    """

    group: int
    params: list[MainParam]
    models: TrackedParams = field(init=False)
    _slots: slice | NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.models = TrackedParams(param.model for param in self.params)
        slots = np.array([param.slot for param in self.params], dtype=np.int64)
        in_a_row = len(slots) > 0 and np.array_equal(slots, np.arange(slots[0], slots[0] + len(slots)))
        self._slots = slice(slots[0], slots[-1] + 1) if in_a_row else slots

    def grads(self, snapshot: TensorList | None) -> GradList:
        """Return ``param.grad`` of all model params.

        ``snapshot``: as :meth:`MainParams.sync_from_model` has just returned it; None: take a new one.
        """
        params = self.models.params
        if snapshot is None:
            return ParamList(params).grads(params, slice(None), self)
        return snapshot.grads(params, self._slots, self) if isinstance(snapshot, ParamList) else GradList(params)

    def record_version(self, versions: NDArray[np.int64] | None = None) -> None:
        """Record that all model params have just been written, as the roundings of their main params.

        ``versions``: of their local parts, where known.
        """
        watch = self.params[0].tracker if self.params else None
        if watch is not None:
            if versions is None or self.models.are_dtensors:
                versions = self.models.versions()
            watch.take_written(self._slots, versions)


def units_of(group: int, params: list[MainParam]) -> list[UpdateUnit]:
    """Return units of parameters of one group: one of all without a twin in host memory, and slices of the others."""
    here = [param for param in params if param.twin is None]
    made = [UpdateUnit(group, here)] if here or not params else []
    there: list[MainParam] = []
    numel = 0
    for param in params:
        if param.twin is None:
            continue
        if there and numel + param.main.numel() > SLICE:
            made.append(UpdateUnit(group, there))
            there, numel = [], 0
        there.append(param)
        numel += param.main.numel()
    return [*made, UpdateUnit(group, there)] if there else made
