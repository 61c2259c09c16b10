"""The torch backend: torch's own fused kernels over cache-sized blocks. Works everywhere and needs no compiler.

A gradient is converted into scratch and used, and its main param is rounded back, while all of it is in cache. Operands
that do not share one dense memory layout, 8-bit moments, and options that torch's kernels do not honour on the
device, are updated by the reference's arithmetic.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megascale.kernels.blocks import Block, RoundingWatch, Row, Scratch, blocks_of, pieces_of, rows_of, takes_many
from megascale.kernels.decision import Decision, TensorStats
from megascale.kernels.protocol import Operands, runs_of
from megascale.kernels.reference import ReferenceBackend
from megascale.kernels.rounding import of_trained
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.rules import AdamHyper, LionHyper, SgdHyper


class TorchBackend(ReferenceBackend):
    """See :class:`megascale.kernels.Backend`."""

    name = "torch"

    def measure(self, grads: Sequence[Tensor | None], count_zeros: bool) -> TensorStats:
        """See :class:`megascale.kernels.Backend`.

        Sums of squares are fp32 within a block and fp64 across blocks; counts are exact.
        """
        device = TensorList.of(grads).filled[0].device
        scratch = Scratch(device)
        pieces, num_pieces = pieces_of(grads, scratch.block)
        if not pieces:
            table = torch.zeros(0, 3 if count_zeros else 2, dtype=torch.float64, device=device)
        elif takes_many(device):  # one launch of a foreach kernel reads all pieces of a block
            blocks = ([pieces[index] for index in run] for run in runs_of(pieces, scratch.block))
            table = torch.cat([_measured_together(block, scratch, count_zeros).to(torch.float64) for block in blocks])
        else:
            values = [value for piece in pieces for value in _measured(piece, scratch, count_zeros)]
            table = torch.stack(values).to(torch.float64).view(len(pieces), -1)
        return TensorStats.of_pieces(table, num_pieces)

    @of_trained
    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if hyper.amsgrad else [])
        rows = rows_of(operands, names)
        if rows is None or operands.has_codes:
            return super().adam_(operands, hyper, decision)
        steps = list(operands.step)
        # A list, because the overload for a single tensor reads it on the host.
        torch._foreach_add_(steps, [1 - decision.found_inf] * len(steps))
        fused = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_

        def update_(block: Block) -> None:
            moments = [block.widened(3 + index) for index in range(len(names))]
            fused(
                block.column(0),
                block.unscaled(decision.coefficient),
                moments[0],
                moments[1],
                moments[2] if hyper.amsgrad else [],
                [steps[owner] for owner in block.owners],
                lr=_rate(hyper.lr),
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                weight_decay=hyper.weight_decay,
                eps=hyper.eps,
                amsgrad=hyper.amsgrad,
                maximize=hyper.maximize,
                grad_scale=None,
                found_inf=decision.found_inf,
            )
            for index, copies in enumerate(moments):
                block.narrow_(3 + index, copies)

        return _by_blocks(rows, update_)

    @of_trained
    def sgd_(self, operands: Operands, hyper: SgdHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        rows = rows_of(operands, ["momentum_buffer"] if hyper.momentum != 0 else [])
        if rows is None or (hyper.momentum != 0 and hyper.dampening != 0):
            return super().sgd_(operands, hyper, decision)

        def update_(block: Block) -> None:
            buffers = block.widened(3) if hyper.momentum != 0 else []
            torch._fused_sgd_(
                block.column(0),
                block.unscaled(decision.coefficient),
                buffers,
                weight_decay=hyper.weight_decay,
                momentum=hyper.momentum,
                lr=_rate(hyper.lr),
                dampening=hyper.dampening,
                nesterov=hyper.nesterov,
                maximize=hyper.maximize,
                is_first_step=False,  # buffers start as zeros; without dampening that is the same
                grad_scale=None,
                found_inf=decision.found_inf,
            )
            if buffers:
                block.narrow_(3, buffers)

        return _by_blocks(rows, update_)

    @of_trained
    def lion_(self, operands: Operands, hyper: LionHyper, decision: Decision) -> Tensor:
        """See :class:`megascale.kernels.Backend`. torch has no Lion kernel: the reference's code runs in cache."""
        rows = rows_of(operands, ["exp_avg"])
        if rows is None:
            return super().lion_(operands, hyper, decision)

        def update_(block: Block) -> None:
            main, grad, exp_avg = (block.column(index) for index in (0, 1, 3))
            ReferenceBackend.lion_(self, Operands(main, main, grad, {"exp_avg": exp_avg}), hyper, decision)

        return _by_blocks(rows, update_)


def _measured(piece: Tensor, scratch: Scratch, count_zeros: bool) -> list[Tensor]:
    """Return sum of squares, non-finite count and, with ``count_zeros``, zeros of a 1-D tensor, as 0-d tensors."""
    dtype = torch.float64 if piece.dtype == torch.float64 else torch.float32
    work = scratch.view(piece.numel(), dtype)
    if piece.dtype != dtype:
        piece = work.copy_(piece)
    stats = [torch.dot(piece, piece)]
    zeros = [torch.eq(piece, 0, out=scratch.view(piece.numel(), dtype, slot=1)).sum()] if count_zeros else []
    # x - x is 0 where x is finite and NaN where it is not; only NaN differs from itself.
    torch.sub(piece, piece, out=work)
    stats.append(torch.ne(work, work, out=work).sum())
    return stats + zeros


def _measured_together(block: list[Tensor], scratch: Scratch, count_zeros: bool) -> Tensor:
    """Return the same of 1-D tensors of one dtype: shape [len(block), 2 or 3]."""
    dtype = torch.float64 if block[0].dtype == torch.float64 else torch.float32
    sizes = [piece.numel() for piece in block]
    copied, found = (scratch.view(sum(sizes), dtype, slot) for slot in (0, 1))

    def summed(values: Tensor) -> Tensor:
        """Return the sum of each tensor's values, none of which is negative: the norm of order 1."""
        return torch.stack(torch._foreach_norm(list(values.split(sizes)), 1))

    torch._foreach_copy_(list(copied.split(sizes)), block)
    columns = [summed(torch.mul(copied, copied, out=found))]
    zeros = [summed(torch.eq(copied, 0, out=found))] if count_zeros else []
    torch.ne(copied.sub_(copied), copied, out=found)
    return torch.stack([*columns, summed(found), *zeros], dim=1)


def _by_blocks(rows: list[Row], update_: Callable[[Block], None]) -> Tensor:
    """Update rows block by block. Returns their overflow flags."""
    watch = RoundingWatch(len(rows))
    for block in blocks_of(rows):
        update_(block)
        block.write_back_(watch)
    return watch.flags(rows[0][0].device)


def _rate(lr: float | Tensor) -> float | Tensor:
    """Return a learning rate as torch's fused kernels take it: on a device they read fp32, on a CPU the number."""
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        return float(lr.detach().numpy())
    return lr.to(torch.float32) if isinstance(lr, Tensor) else lr
