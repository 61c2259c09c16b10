"""Snapshot: what a wrapped optimizer holds, copied, so that all that its methods write can be taken back."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from megascale.main_params.main_param import MainParam
from megascale.step.lending import holders_of, put_back
from megascale.utils.dtensors import held, to_local


class Snapshot:
    """Main params, the state of their optimizer and of those that it holds, options of groups, and plain attributes.

    Tensors stay the same objects in the same memory. Costs a copy of all of them for as long as it lives.

    Args:
        optimizer: the wrapped one.
        params: of this rank. Where a remainder stands for a main param, nothing of it changes before it is encoded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[MainParam]) -> None:
        # By id a tensor, the memory that it has, and a copy of its values.
        self._saved: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for param in params:
            if param.remainder is None:
                self._save(param.main)
        self._holders = [
            (
                holder,
                dict(vars(holder)),
                self._copied(dict(holder.state)),
                [
                    (group, self._copied({name: value for name, value in group.items() if name != "params"}))
                    for group in holder.param_groups
                ],
            )
            for holder in holders_of(optimizer).values()
        ]

    def restore(self) -> None:
        """Put all of it back. Model params must be in param groups, and keys of the state."""
        for holder, attributes, state, groups in self._holders:
            vars(holder).clear()
            put_back(holder, attributes, state, groups)
        for tensor, memory, values in self._saved.values():
            memory.copy_(values)
            if to_local(tensor).data_ptr() != memory.data_ptr():
                held(tensor).data = memory

    def _copied(self, nest: Any) -> Any:
        """Return ``nest`` with new containers; its tensors are the same, and saved."""
        if isinstance(nest, Tensor):
            self._save(nest)
            return nest
        if isinstance(nest, Mapping):
            made = copy(nest)
            for key, value in nest.items():
                made[key] = self._copied(value)  # type: ignore[index]
            return made
        if isinstance(nest, (list, tuple)):
            return type(nest)([self._copied(value) for value in nest])
        return copy(nest)

    def _save(self, tensor: Tensor) -> None:
        if id(tensor) not in self._saved:
            memory = to_local(tensor)
            self._saved[id(tensor)] = tensor, memory, memory.clone()
