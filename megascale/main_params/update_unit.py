"""Main params that are updated in one go."""

from dataclasses import dataclass, field

import torch

from megascale.kernels.blocks import flat
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import held

SLICE = 1 << 24
"""Elements, about, that are updated in host memory before their weights travel."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class UpdateUnit:
    """Main params that one kernel call updates: of one param group, device and dtype, all held as remainders or none.

    All of them share a dense memory layout with their model params, or none does. The same object is kept, for caches,
    until params or memory change.

    Attributes:
        group: the index of their param group.
        params: in the order of the update; where sharded, those of which this rank owns elements.
        elsewhere: empty pieces of parameters that are gathered with these, and whose elements other ranks own. No step
            goes through them: a rank holds them so that all ranks have the same state, and count the same steps.
        counted: those of ``elsewhere`` that are trained, and have a gradient in every step therefore.
        is_on_host: whether main params live in host memory: all of them do, or none.
        slots: of ``params`` in the tracker of writes.
    """

    group: int
    params: list[MainParam]
    elsewhere: list[MainParam] = field(default_factory=list)
    counted: list[MainParam] = field(init=False)
    is_on_host: bool = field(init=False)
    slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counted = [param for param in self.elsewhere if param.model.requires_grad]
        self.is_on_host = any(param.on_host is not None for param in (*self.params, *self.elsewhere))
        self.slots = [param.slot for param in self.params]


def units_of(group: int, params: list[MainParam]) -> list[UpdateUnit]:
    """Return the units of parameters of one group; first those on devices, then slices of those in host memory."""
    alike: dict[tuple[bool, torch.device, torch.dtype, bool], list[MainParam]] = {}
    for param in params:
        memory = held(param.memory)
        is_dense = flat([memory, param.rounded if param.is_copy else memory]) is not None
        alike.setdefault((param.on_host is not None, memory.device, memory.dtype, is_dense), []).append(param)
    units: list[UpdateUnit] = []
    for kind in sorted(alike, key=lambda kind: kind[0]):
        taken, numel = list[MainParam](), 0
        for param in alike[kind]:
            # While a slice travels, the next one is updated.
            if taken and param.on_host is not None and numel + param.main.numel() > SLICE:
                units.append(UpdateUnit(group, taken))
                taken, numel = [], 0
            taken.append(param)
            numel += param.main.numel()
        units.append(UpdateUnit(group, taken))
    return units
