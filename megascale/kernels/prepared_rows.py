"""Rows of operands that come again step by step with other gradients: what does not change is worked out once."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megascale.kernels.blocks import Row, flat
from megascale.kernels.operands import Operands
from megascale.kernels.runs import Run, runs_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class PreparedRows:
    """1-D views of main params, model params and states, merged where they lie side by side.

    Args:
        operands: one entry per parameter, at least one.
        names: of the states, in the order that rows have them.

    Attributes:
        rows: per parameter: main, model, states. None where main is not fp32, another dtype is none of :data:`DTYPES`,
            or no dense memory layout is shared.
    """

    def __init__(self, operands: Operands, names: Sequence[str]) -> None:
        self.names = tuple(names)
        columns = [operands.main, operands.model, *(operands.state[name] for name in names)]
        self.rows = [_fixed_row(list(tensors)) for tensors in zip(*columns, strict=True)]
        self._mains = [None if main.is_contiguous() else main for main in operands.main]
        present = [index for index, row in enumerate(self.rows) if row is not None]
        rows = [row for row in self.rows if row is not None]
        runs = runs_of(rows, [None] * len(rows))
        self._runs = [Run(run.row, [present[index] for index in run.members]) for run in runs]

    def flat_grads(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return 1-D views of gradients in the memory order of their rows; None where there is no such view, or row."""
        views: list[Tensor | None] = []
        for row, main, grad in zip(self.rows, self._mains, grads, strict=True):
            view = None
            if row is not None and grad.dtype in DTYPES and grad.device == row[0].device:
                if main is None:
                    view = grad.view(-1) if grad.is_contiguous() else None
                elif (both := flat([main, grad])) is not None:
                    view = both[1]
            views.append(view)
        return views

    def runs(self, grads: Sequence[Tensor | None], keys: Sequence[Hashable]) -> list[Run]:
        """Return the runs of rows with gradients: main, grad, model, states.

        Args:
            grads: what :meth:`flat_grads` returned.
            keys: per parameter, see :func:`megascale.kernels.runs.runs_of`.
        """
        found: list[Run] = []
        for fixed in self._runs:
            present = [(index, grad) for index in fixed.members if (grad := grads[index]) is not None]
            if len(fixed.members) > 1:
                merged = runs_of([[grad] for _, grad in present], [keys[index] for index, _ in present])
                if len(merged) != 1 or len(present) < len(fixed.members):
                    found += self._parts(present, keys)
                    continue
                found.append(Run(_with_grad(fixed.row, merged[0].row[0]), fixed.members))
            elif present:
                found.append(Run(_with_grad(fixed.row, present[0][1]), fixed.members))
        return found

    def _parts(self, present: list[tuple[int, Tensor]], keys: Sequence[Hashable]) -> list[Run]:
        """Return the runs of rows that do not make one run with their gradients."""
        rows = [_with_grad(row, grad) for index, grad in present if (row := self.rows[index]) is not None]
        runs = runs_of(rows, [keys[index] for index, _ in present])
        return [Run(run.row, [present[place][0] for place in run.members]) for run in runs]


def _fixed_row(tensors: Row) -> Row | None:
    device = tensors[0].device
    known = all(tensor.dtype in DTYPES and tensor.device == device for tensor in tensors)
    return flat(tensors) if known and tensors[0].dtype == torch.float32 else None


def _with_grad(fixed: Row, grad: Tensor) -> Row:
    return [fixed[0], grad, *fixed[1:]]
