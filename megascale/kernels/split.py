"""What a fast path can take, and what is left to a slower one."""

from collections.abc import Callable

import torch
from torch import Tensor

from megascale.kernels.blocks import Row, flat
from megascale.kernels.protocol import Operands


class Split:
    """The operands of one update in two parts.

    Args:
        operands: one entry per parameter, at least one.
        names: of the states, in the order that rows have them.
        takes: whether the fast path knows these tensors: main, grad, model, states.

    Attributes:
        rows: 1-D views of what ``takes`` accepts and what shares one dense memory layout.
        taken: the indices of those.
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
        """Return the flags of both parts in the order of the operands: ``slow`` updates what was not taken.

        No index travels to a device.
        """
        if not self._rest:
            return fast()
        flags = dict(zip(self._rest, slow(self._operands.pick(self._rest)).unbind(), strict=True))
        if self.taken:
            flags |= dict(zip(self.taken, fast().unbind(), strict=True))
        return torch.stack([flags[index] for index in sorted(flags)])
