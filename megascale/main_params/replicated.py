"""Replicated main params: every rank keeps all of them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from megascale.main_params.base import MainParams
from megascale.main_params.group_scales import place_scales
from megascale.main_params.main_param import MainParam, main_param_of
from megascale.main_params.slab import Slabs
from megascale.main_params.update_unit import UpdateUnit
from megascale.main_params.write_tracker import WriteTracker
from megascale.utils.autograd import detached
from megascale.utils.collectives import full_tensor
from megascale.utils.dtensors import distribute_like, is_dtensor


class ReplicatedMainParams(MainParams):
    """Every rank keeps all main params."""

    @override
    def make(self, params: Mapping[str, nn.Parameter], group_of: Mapping[str, int]) -> list[MainParam]:
        twins = self.twins(params, [([name], param.numel()) for name, param in params.items()])
        slabs = Slabs(twins[name].weights if name in twins else param for name, param in params.items())
        as_remainder = self.stores_remainders
        return [
            main_param_of(name, param, None, slabs, as_remainder=as_remainder, twin=twins.get(name))
            for name, param in params.items()
        ]

    @override
    def get_or_create(self, param: nn.Parameter, name: str) -> MainParam:
        if id(param) not in self._by_id:
            twin = self.twins({name: param}, [([name], param.numel())]).get(name)
            made = main_param_of(name, param, None, Slabs(()), as_remainder=self.stores_remainders, twin=twin)
            self._by_id[id(param)] = made
            made.tracker = WriteTracker([param])
        return self._by_id[id(param)]

    @override
    def restore(self) -> None:
        """Do nothing: replaced storage counts as a write."""

    @override
    def mark_written(self, unit: UpdateUnit) -> None:
        unit.record_version()

    @override
    def wait(self, *, for_host: bool = True) -> None:
        self.wait_for_arrivals(for_host=for_host)

    @override
    def to_local(self, param: nn.Parameter, value: Tensor, dtype: torch.dtype, *, group: int = 1) -> Tensor:
        known = self._by_id.get(id(param))
        like = param if known is None or known.twin is None else known.main  # which is in host memory
        if group > 1:
            return place_scales(value, like, dtype)
        return place_like(value, like, dtype)

    @override
    def local_part(self, param: MainParam, value: Tensor) -> Tensor:
        return value

    @override
    def export(self, param: MainParam, values: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
        return {key: value.detach().clone() if copy else detached(value) for key, value in values.items()}


def place_like(value: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a new tensor with the values of ``value`` and the device, strides and placements of ``like``."""
    with torch.no_grad():
        if is_dtensor(like) and not is_dtensor(value):
            value = distribute_like(value, like)
        elif is_dtensor(value) and not is_dtensor(like):
            value = full_tensor(value)
        placed = torch.empty_like(like, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
        return placed.copy_(value)
