"""Snapshot: what a wrapped optimizer holds, copied, so that all that its methods write can be taken back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.main_params.main_param import MainParam
from megascale.step.lending import put_back
from megascale.utils.dtensors import held, to_local
from megascale.utils.nests import map_tensors


class Snapshot:
    """Main params, the state of their optimizer, options of groups, and plain attributes.

    Tensors stay the same objects in the same memory. Costs a copy of all of them for as long as it lives.

    Args:
        optimizer: the wrapped one.
        params: of this rank. Where a remainder stands for a main param, nothing of it changes before it is encoded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[MainParam]) -> None:
        self._optimizer = optimizer
        # By id a tensor, the memory that it has, and a copy of its values.
        self._saved: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for param in params:
            if param.remainder is None:
                self._save(param.main)
        self._attributes = dict(vars(optimizer))
        self._state = map_tensors(self._save, optimizer.state)
        options = (
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        )
        self._groups = list(zip(optimizer.param_groups, map_tensors(self._save, list(options)), strict=True))

    def restore(self) -> None:
        """Put all of it back. Model params must be in param groups, and keys of the state."""
        vars(self._optimizer).clear()
        vars(self._optimizer).update(self._attributes)
        put_back(self._optimizer, self._state, self._groups)
        for tensor, memory, values in self._saved.values():
            memory.copy_(values)
            if to_local(tensor).data_ptr() != memory.data_ptr():
                held(tensor).data = memory

    def _save(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._saved:
            memory = to_local(tensor)
            self._saved[id(tensor)] = tensor, memory, memory.clone()
        return tensor
