"""Splits operands into those that a fast path can take and the others."""

from collections.abc import Callable

import torch
from torch import Tensor

from megascale.kernels.blocks import Row, flat
from megascale.kernels.protocol import Operands


class Split:
    """The operands of one update in two parts, for a fast and for a slow path.

    Args:
        operands: one entry per parameter, at least one.
        names: of the states, in their order in a row.
        takes: tells whether the fast path supports these tensors: main, grad, model, states.

    Attributes:
        rows: 1-D views of the operands that ``takes`` accepts and that share one dense memory layout.
        taken: the indices of the rows in the operands.
    """

    def __init__(self, operands: Operands, names: list[str], takes: Callable[[Row], bool] | None = None) -> None:
        self.rows: list[Row] = []
        self.taken: list[int] = []
        self._operands = operands
        self._rest: list[int] = []
        columns = [operands.main, operands.grad, operands.model, *(operands.state[name] for name in names)]
        for index, tensors in enumerate(zip(*columns, strict=True)):
            row = flat(list(tensors)) if takes is None or takes(list(tensors)) else None
            if row is None:
                self._rest.append(index)
            else:
                self.rows.append(row)
                self.taken.append(index)

    def joined(self, fast: Callable[[], Tensor], slow: Callable[[Operands], Tensor]) -> Tensor:
        """Update both parts and return their flags in the order of the operands. No index is copied to a device."""
        if not self._rest:
            return fast()
        flags = dict(zip(self._rest, slow(self._operands.pick(self._rest)).unbind(), strict=True))
        if self.taken:
            flags |= dict(zip(self.taken, fast().unbind(), strict=True))
        return torch.stack([flags[index] for index in sorted(flags)])
