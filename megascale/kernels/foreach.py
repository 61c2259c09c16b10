"""Statistics by torch's foreach kernels: on a device one launch reads many tensors, where blocks would launch for each.

A CPU has no such kernels. There :mod:`megascale.kernels.blocks` keeps a block in cache from one pass to the next.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megascale.kernels.blocks import Scratch, flat
from megascale.kernels.decision import TensorStats


def measure(grads: Sequence[Tensor], count_zeros: bool, dtype: torch.dtype) -> TensorStats:
    """Return what :meth:`megascale.kernels.Backend.measure` does, in ``dtype``.

    Sums of squares are fp32 within a block, of at most 16M elements, and ``dtype`` across blocks; counts are exact.
    """
    scratch = Scratch(grads[0].device)
    pieces, num_pieces = [], []
    for grad in grads:
        [row] = flat([grad]) or [grad.reshape(-1)]
        cut = list(row.split(scratch.block)) if row.numel() else []
        num_pieces.append(len(cut))
        pieces += cut
    tables = [_of_block(block, scratch, count_zeros, dtype) for block in _blocks_of(pieces, scratch.block)]
    columns = 3 if count_zeros else 2
    table = torch.cat(tables) if tables else torch.zeros(0, columns, dtype=dtype, device=grads[0].device)
    if num_pieces != [1] * len(grads):
        parts = table.split(num_pieces)
        table = torch.cat([part if len(part) == 1 else part.sum(0, keepdim=True) for part in parts])
    return TensorStats(table[:, 0], table[:, 1], table[:, 2] if count_zeros else None)


def _of_block(block: list[Tensor], scratch: Scratch, count_zeros: bool, dtype: torch.dtype) -> Tensor:
    """Return the statistics of 1-D tensors of one dtype: shape [len(block), 2 or 3]."""
    within = torch.float64 if block[0].dtype == torch.float64 else torch.float32
    sizes = [piece.numel() for piece in block]
    copied, squares = (scratch.view(sum(sizes), within, slot) for slot in (0, 1))
    each = list(copied.split(sizes))

    def summed(values: Tensor) -> Tensor:
        """Return the sum of each tensor's values, none of which is negative: the norm of order 1."""
        return torch.stack(torch._foreach_norm(list(values.split(sizes)), 1)).to(dtype)

    torch._foreach_copy_(each, block)
    columns = [summed(torch.mul(copied, copied, out=squares))]
    # x - x is 0 where x is finite and NaN where it is not; only NaN differs from itself.
    torch.ne(copied.sub_(copied), copied, out=squares)
    columns.append(summed(squares))
    if count_zeros:
        torch._foreach_copy_(each, block)
        columns.append(summed(torch.eq(copied, 0, out=squares)))
    return torch.stack(columns, dim=1)


def _blocks_of(pieces: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yield runs of pieces of one dtype, of at most ``limit`` elements together, in order."""
    block: list[Tensor] = []
    numel = 0
    for piece in pieces:
        if block and (numel + piece.numel() > limit or piece.dtype != block[0].dtype):
            yield block
            block, numel = [], 0
        block.append(piece)
        numel += piece.numel()
    if block:
        yield block
