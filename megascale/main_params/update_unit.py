"""Main params that are updated in one go."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from megascale.kernels.blocks import flat
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import held

SLICE = 1 << 24
"""About how many elements a unit in host memory has: while its weights travel, the next one is updated."""


@dataclass(eq=False, slots=True)
class UpdateUnit:
    """Main params that are updated together: of one device and dtype, all held as remainders or none.

    All of them share a dense memory layout with their model params, or none does. The same object is kept, for caches,
    until params or memory change.

    Attributes:
        groups: the main params of each param group, by its index; where sharded, those that this rank owns some of.
            In host memory, and where sharded, there is one.
        params: all of these, in the order of the update.
        elsewhere: empty pieces of parameters that are gathered with these, and whose elements other ranks own. No step
            goes through them: a rank holds them so that all ranks have the same state, and count the same steps.
        counted: those of ``elsewhere`` that are trained, and have a gradient in every step therefore.
        is_on_host: whether main params live in host memory: all of them do, or none.
        slots: of ``params`` in the tracker of writes.
        calls: of kernels, which :class:`megascale.step.kernel_update.KernelUpdate` keeps here; None: no step was taken.
    """

    groups: dict[int, list[MainParam]]
    elsewhere: list[MainParam] = field(default_factory=list)
    params: list[MainParam] = field(init=False)
    counted: list[MainParam] = field(init=False)
    is_on_host: bool = field(init=False)
    slots: list[int] = field(init=False)
    calls: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.params = list(chain.from_iterable(self.groups.values()))
        self.counted = [param for param in self.elsewhere if param.model.requires_grad]
        self.is_on_host = any(param.on_host is not None for param in (*self.params, *self.elsewhere))
        self.slots = [param.slot for param in self.params]


def units_of(ordered: Sequence[list[MainParam]]) -> list[UpdateUnit]:
    """Return the units: on devices as few as there can be, each of all param groups; then those in host memory, each of
    one param group and about SLICE elements. ``ordered``: the main params of each param group.
    """
    alike: dict[tuple[bool, torch.device, torch.dtype, bool], dict[int, list[MainParam]]] = {}
    for group, param in ((group, param) for group, params in enumerate(ordered) for param in params):
        memory = held(param.memory)  # int16 where held as remainders
        # Kernels read a main param only if it and its model param share one dense layout.
        is_dense = flat([memory, param.rounded if param.is_copy else memory]) is not None
        kind = (param.on_host is not None, memory.device, memory.dtype, is_dense)
        alike.setdefault(kind, {}).setdefault(group, []).append(param)
    units: list[UpdateUnit] = []
    for (is_on_host, *_), groups in sorted(alike.items(), key=lambda item: item[0][0]):
        if not is_on_host:
            units.append(UpdateUnit(groups))
            continue
        for group, params in groups.items():
            taken, numel = list[MainParam](), 0
            for param in params:
                own = held(param.memory).numel()  # of a DTensor this rank's
                if taken and numel + own > SLICE:
                    units.append(UpdateUnit({group: taken}))
                    taken, numel = [], 0
                taken.append(param)
                numel += own
            units.append(UpdateUnit({group: taken}))
    return units
