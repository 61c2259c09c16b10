"""Main params that are updated in one go."""

from dataclasses import dataclass, field

from megascale.kernels import GradReader
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import is_dtensor

SLICE = 1 << 24
"""Elements, about, that are updated in host memory before their weights travel."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class UpdateUnit:
    """Main params that one kernel call updates. The same object is kept, for caches, until params or memory change.

    Attributes:
        group: the index of their param group.
        params: in the order of the update.
        has_dtensors: whether a model param is a DTensor.
        grads: reads ``param.grad`` of all model params.
    """

    group: int
    params: list[MainParam]
    has_dtensors: bool = field(init=False)
    grads: GradReader = field(init=False)
    _slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        models = [param.model for param in self.params]
        self.has_dtensors = any(map(is_dtensor, models))
        self.grads = GradReader(list(models))
        self._slots = [param.slot for param in self.params]

    def record_version(self) -> None:
        """Record that all model params have just been written, as the roundings of their main params."""
        tracker = self.params[0].tracker if self.params else None
        if tracker is not None:
            tracker.take_written(self._slots)


def units_of(group: int, params: list[MainParam]) -> list[UpdateUnit]:
    """Return units of parameters of one group: one of all on the device, and slices of those in host memory."""
    here = [param for param in params if param.on_host is None]
    made = [UpdateUnit(group, here)] if here or not params else []
    there: list[MainParam] = []
    numel = 0
    for param in params:
        if param.on_host is None:
            continue
        if there and numel + param.main.numel() > SLICE:
            made.append(UpdateUnit(group, there))
            there, numel = [], 0
        there.append(param)
        numel += param.main.numel()
    return [*made, UpdateUnit(group, there)] if there else made
