"""Statistics of gradients by torch's own kernels, block by block; and what is not finite in one of them.

On a device one launch of a foreach kernel reads many tensors. A CPU has no such kernels: there
:class:`megascale.kernels.blocks.Scratch` keeps a block in cache from one pass to the next.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megascale.kernels.blocks import Scratch, pieces_of, takes_many
from megascale.kernels.decision import TensorStats, stats_dtype
from megascale.kernels.tensors.tensor_list import TensorList


def measure(grads: Sequence[Tensor | None], count_zeros: bool) -> TensorStats:
    """Return what :meth:`megascale.kernels.Backend.measure` does.

    Sums of squares are fp32 within a block and in the statistics dtype across blocks; counts are exact.
    """
    device, columns = TensorList.of(grads).filled[0].device, 3 if count_zeros else 2
    dtype, scratch = stats_dtype(device), Scratch(device)
    pieces, num_pieces = pieces_of(grads, scratch.block)
    if not pieces:
        table = torch.zeros(0, columns, dtype=dtype, device=device)
    elif takes_many(device):
        blocks = _blocks_of(pieces, scratch.block)
        table = torch.cat([_of_block(block, scratch, count_zeros, dtype) for block in blocks])
    else:
        values = [value for piece in pieces for value in scratch.measure(piece, count_zeros)]
        table = torch.stack(values).to(dtype).view(-1, columns)
    return TensorStats.of_pieces(table, num_pieces)


@torch.no_grad()
def describe_non_finite(tensor: Tensor) -> Tensor:
    """Return (elements that are inf, elements that are NaN, largest finite magnitude): fp64 (MPS: fp32), shape [3].

    On the tensor's device, without a host sync. The magnitude is 0 where no element is finite. It reads the tensor
    several times: for tensors that overflowed.
    """
    exact = stats_dtype(tensor.device)
    size = tensor.abs()
    num_inf, num_nan = (size == torch.inf).sum(dtype=exact), (size != size).sum(dtype=exact)
    finite = torch.nan_to_num(size, nan=0.0, posinf=0.0)
    largest = finite.amax() if tensor.numel() else finite.new_zeros(())
    return torch.stack([num_inf, num_nan, largest.to(exact)])


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
