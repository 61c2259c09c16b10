"""Cache-sized blocks: runs of 1-D pieces of many parameters that go through cache together, and their scratch."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from megascale.kernels.protocol import FP16_OVERFLOW, Operands, runs_of
from megascale.kernels.tensors.tensor_list import TensorList

BLOCK_ON_CPU = 1 << 18  # elements; 1 MiB of fp32 scratch stays in cache
BLOCK_ON_DEVICE = 1 << 24  # elements; 64 MiB of fp32 scratch fills a GPU, and counts up to it are exact in fp32

Row = list[Tensor]
"""1-D tensors of one parameter, or of a piece of it: main, grad, model, then the state."""


def takes_many(device: torch.device) -> bool:
    """Whether torch's foreach functions read many tensors in one launch there. A CPU has no such kernels."""
    return device.type != "cpu"


class Scratch:
    """Reused buffers of one block on one device."""

    def __init__(self, device: torch.device) -> None:
        self.block = BLOCK_ON_CPU if device.type == "cpu" else BLOCK_ON_DEVICE
        self._device = device
        self._buffers: dict[tuple[torch.dtype, int], Tensor] = {}

    def view(self, numel: int, dtype: torch.dtype, slot: int = 0) -> Tensor:
        """Return uninitialised scratch of shape [numel]. Valid until the next call for the same slot and dtype."""
        buffer = self._buffers.get((dtype, slot))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype, slot] = torch.empty(numel, dtype=dtype, device=self._device)
        return buffer[:numel]


class RoundingWatch:
    """Collects, per row, the minimum and maximum of main params that are rounded to fp16."""

    def __init__(self, num_rows: int) -> None:
        self._extremes: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_rows)]

    def observe(self, rows: Iterable[int], mains: Sequence[Tensor], models: Sequence[Tensor]) -> None:
        """Look for overflow in pieces of ``rows``, best while they are in cache. Only fp16 can overflow."""
        at_risk = [
            (row, main)
            for row, main, model in zip(rows, mains, models, strict=True)
            if model.dtype == torch.float16 and main.numel()
        ]
        if at_risk and takes_many(at_risk[0][1].device):
            largest = torch._foreach_norm([main for _, main in at_risk], torch.inf)  # NaN where there is one
            for (row, _), magnitude in zip(at_risk, largest, strict=True):
                self._extremes[row].append((magnitude, magnitude))
            return
        for row, main in at_risk:
            low, high = torch.aminmax(main)
            self._extremes[row].append((low, high))

    def flags(self, device: torch.device) -> Tensor:
        """Return a bool per row, shape [rows]: whether a rounding is not finite. NaN counts too."""
        nothing = torch.zeros((), device=device)
        extremes = [found or [(nothing, nothing)] for found in self._extremes]
        lows, highs = map(torch.stack, zip(*chain.from_iterable(extremes), strict=True))
        overflowed = ((lows > -FP16_OVERFLOW) & (highs < FP16_OVERFLOW)).logical_not_()
        if len(overflowed) == len(extremes):
            return overflowed
        return torch.stack([pieces.any() for pieces in overflowed.split(list(map(len, extremes)))])


class Block:
    """Pieces of one main dtype; ``owners`` has the row of each."""

    def __init__(self, scratch: Scratch, owned: Sequence[tuple[int, Row]]) -> None:
        self._scratch = scratch
        self.owners = [owner for owner, _ in owned]
        self.pieces = [piece for _, piece in owned]
        self.numel = sum(piece[0].numel() for piece in self.pieces)

    def column(self, index: int) -> list[Tensor]:
        """Return one tensor of every piece."""
        return [piece[index] for piece in self.pieces]

    def widened(self, index: int) -> list[Tensor]:
        """Return a column in the main params' dtype: itself, or a copy in scratch that :meth:`narrow_` writes back."""
        live, dtype = self.column(index), self.pieces[0][0].dtype
        if all(tensor.dtype == dtype for tensor in live):
            return live
        buffer = self._scratch.view(self.numel, dtype, slot=index)
        copies = list(buffer.split([tensor.numel() for tensor in live]))
        torch._foreach_copy_(copies, live)
        return copies

    def narrow_(self, index: int, copies: list[Tensor]) -> None:
        """Round what :meth:`widened` returned into the column, unless it is the column."""
        pairs = [(piece[index], copy) for piece, copy in zip(self.pieces, copies, strict=True)]
        pairs = [(live, copy) for live, copy in pairs if live.data_ptr() != copy.data_ptr()]
        if pairs:
            torch._foreach_copy_([live for live, _ in pairs], [copy for _, copy in pairs])

    def unscaled(self, coefficient: Tensor) -> list[Tensor]:
        """Return the gradients times ``coefficient`` in the main params' dtype, in scratch."""
        buffer = self._scratch.view(self.numel, self.pieces[0][0].dtype)
        scaled, grads = self.column(1), list(buffer.split([piece[0].numel() for piece in self.pieces]))
        if not takes_many(buffer.device) and all(grad.dtype == buffer.dtype for grad in scaled):
            for grad, out in zip(scaled, grads, strict=True):
                torch.mul(grad, coefficient, out=out)
        else:
            torch._foreach_copy_(grads, scaled)
            buffer.mul_(coefficient)
        return grads

    def write_back_(self, watch: RoundingWatch) -> None:
        """Round main into model where they differ in dtype, and let ``watch`` see all of them."""
        copied = [piece for piece in self.pieces if piece[2].dtype != piece[0].dtype]
        if copied:
            torch._foreach_copy_([piece[2] for piece in copied], [piece[0] for piece in copied])
        watch.observe(self.owners, self.column(0), self.column(2))


def blocks_of(rows: list[Row]) -> Iterator[Block]:
    """Cut rows into blocks that fit the scratch, one main dtype to a block, in order. Empty rows are left out."""
    if not rows:
        return
    scratch = Scratch(rows[0][0].device)
    owned = [(owner, piece) for owner, row in enumerate(rows) for piece in _pieces(row, scratch.block)]
    for run in runs_of([piece[0] for _, piece in owned], scratch.block):
        yield Block(scratch, [owned[index] for index in run])


def rows_of(operands: Operands, names: Sequence[str]) -> list[Row] | None:
    """Return the rows of all parameters, which have a gradient; None: tensors of one share no dense memory layout.

    ``names``: of the states, in their order in a row.
    """
    columns = [operands.main, operands.grad, operands.model, *(operands.state[name] for name in names)]
    rows: list[Row] = []
    for main, grad, *rest in zip(*columns, strict=True):
        row = flat([main, grad, *rest]) or flat([main, torch.empty_like(main, dtype=grad.dtype).copy_(grad), *rest])
        if row is None:
            return None
        rows.append(row)
    return rows


def share_layout(columns: Sequence[TensorList], *, in_order: bool) -> bool:
    """Return whether the tensors of each parameter share one dense memory layout; ``in_order``: the row-major one."""
    if all(column.forms.contiguous for column in columns):
        return True
    return not in_order and all(flat(list(row)) is not None for row in zip(*(c.filled for c in columns), strict=True))


def laid_out(grads: TensorList, models: Sequence[Tensor]) -> TensorList:
    """Return gradients as kernels read them: those of other strides than their model params are copies."""
    return TensorList.of(
        [
            grad
            if grad is None or grad.stride() == model.stride()
            else torch.empty_like(model, dtype=grad.dtype).copy_(grad)
            for grad, model in zip(grads, models, strict=True)
        ],
        models,
    )


def flat(tensors: list[Tensor]) -> Row | None:
    """Return 1-D views in memory order if all tensors are dense with the same strides, else None."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(-1) for tensor in tensors]
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda dim: strides[dim], reverse=True)
    permuted = [tensor.permute(order) for tensor in tensors]
    if all(tensor.stride() == strides for tensor in tensors) and permuted[0].is_contiguous():
        return [tensor.view(-1) for tensor in permuted]
    return None


def pieces_of(tensors: Sequence[Tensor | None], limit: int) -> tuple[list[Tensor], list[int]]:
    """Return 1-D pieces of at most ``limit`` elements, and how many each has: an empty tensor, or None, has none."""
    cuts = [
        [] if one is None else [piece for [piece] in _pieces(flat([one]) or [one.reshape(-1)], limit)]
        for one in tensors
    ]
    return [piece for cut in cuts for piece in cut], list(map(len, cuts))


def _pieces(row: Row, limit: int) -> Iterator[Row]:
    numel = row[0].numel()
    if 0 < numel <= limit:
        yield row
        return
    for start in range(0, numel, limit):
        yield [tensor[start : start + limit] for tensor in row]
