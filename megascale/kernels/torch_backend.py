"""The torch backend: torch's own fused kernels over cache-sized blocks. Works everywhere and needs no compiler.

A block is a run of 1-D pieces of many parameters that together fill one fp32 scratch buffer: a gradient is converted
into the scratch, used, and its main param is rounded back while all of it is still in cache. Tensors whose operands do
not share one dense memory layout, and optimizer options that torch's kernels do not honour on the device, take the
reference's arithmetic.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megascale.kernels.operands import FP16_OVERFLOW, AdamHyper, Decision, Operands, SgdHyper, TensorStats
from megascale.kernels.reference import ReferenceBackend, stats_dtype

BLOCK_ON_CPU = 1 << 18  # elements; 1 MiB of fp32 scratch stays in cache
BLOCK_ON_DEVICE = 1 << 24  # elements; 64 MiB of fp32 scratch fills a GPU, and counts up to it are exact in fp32

Row = list[Tensor]  # 1-D tensors of one parameter: main, grad, model, state...


class TorchBackend:
    """See :class:`megascale.kernels.Backend`."""

    name = "torch"

    def __init__(self) -> None:
        self._reference = ReferenceBackend()

    def measure(self, grads: list[Tensor], count_zeros: bool) -> TensorStats:
        """See :class:`megascale.kernels.Backend`. Sums of squares are fp32 within a block and fp64 across blocks."""
        scratch = _Scratch(grads[0].device)
        values: list[Tensor] = []
        num_blocks = []
        for grad in grads:
            blocks = (_flat([grad]) or [grad.reshape(-1)])[0].split(scratch.block)
            num_blocks.append(len(blocks))
            for block in blocks:
                values.extend(scratch.measure(block, count_zeros))
        table = torch.stack(values).to(stats_dtype(grads[0].device)).view(sum(num_blocks), -1)
        if len(table) > len(grads):
            table = torch.stack([rows.sum(0) for rows in table.split(num_blocks)])
        return TensorStats(table[:, 0], table[:, 1], table[:, 2] if count_zeros else None)

    def unscale(self, grads: list[Tensor], mains: list[Tensor], coefficient: Tensor) -> list[Tensor]:
        """See :class:`megascale.kernels.Backend`."""
        unscaled = [torch.empty_like(main) for main in mains]
        if unscaled:
            torch._foreach_copy_(unscaled, grads)
            torch._foreach_mul_(unscaled, coefficient)
        return unscaled

    def adam_(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> None:
        """See :class:`megascale.kernels.Backend`."""
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if hyper.amsgrad else [])
        rows, steps, rest = _split(operands, names)
        if steps:
            # A list, because the overload for a single tensor reads it on the host.
            torch._foreach_add_(steps, [1 - decision.found_inf] * len(steps))
        fused = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
        for block in _blocks(rows):
            grads = block.unscaled(decision.coefficient)
            fused(
                block.column(0),
                grads,
                block.column(3),
                block.column(4),
                block.column(5) if hyper.amsgrad else [],
                [steps[owner] for owner in block.owners],
                lr=hyper.lr,
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                weight_decay=hyper.weight_decay,
                eps=hyper.eps,
                amsgrad=hyper.amsgrad,
                maximize=hyper.maximize,
                grad_scale=None,
                found_inf=decision.found_inf,
            )
            block.write_back_()
        if rest.main:
            self._reference.adam_(rest, hyper, decision)

    def sgd_(self, operands: Operands, hyper: SgdHyper, decision: Decision) -> None:
        """See :class:`megascale.kernels.Backend`."""
        if hyper.momentum != 0 and hyper.dampening != 0:
            return self._reference.sgd_(operands, hyper, decision)
        rows, _, rest = _split(operands, ["momentum_buffer"] if hyper.momentum != 0 else [])
        for block in _blocks(rows):
            torch._fused_sgd_(
                block.column(0),
                block.unscaled(decision.coefficient),
                block.column(3) if hyper.momentum != 0 else [],
                weight_decay=hyper.weight_decay,
                momentum=hyper.momentum,
                lr=hyper.lr,
                dampening=hyper.dampening,
                nesterov=hyper.nesterov,
                maximize=hyper.maximize,
                is_first_step=False,
                grad_scale=None,
                found_inf=decision.found_inf,
            )
            block.write_back_()
        if rest.main:
            self._reference.sgd_(rest, hyper, decision)
        return None

    def write_back_(self, mains: list[Tensor], models: list[Tensor]) -> None:
        """See :class:`megascale.kernels.Backend`."""
        if mains:
            torch._foreach_copy_(models, mains)

    def overflows(self, mains: list[Tensor], models: list[Tensor]) -> Tensor:
        """See :class:`megascale.kernels.Backend`."""
        extremes = []
        for main, model in zip(mains, models, strict=True):
            if model.dtype == torch.float16 and main.numel():
                low, high = torch.aminmax(main)
                extremes.append(torch.maximum(-low, high))
            else:
                extremes.append(torch.zeros((), dtype=main.dtype, device=main.device))
        return (torch.stack([extreme.float() for extreme in extremes]) < FP16_OVERFLOW).logical_not_()


class _Scratch:
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

    def measure(self, block: Tensor, count_zeros: bool) -> list[Tensor]:
        """Return sum of squares, non-finite count and, with ``count_zeros``, zeros of a 1-D block, as 0-d tensors."""
        dtype = torch.float64 if block.dtype == torch.float64 else torch.float32
        work = self.view(block.numel(), dtype).copy_(block)
        stats = [torch.dot(work, work)]
        zeros = []
        if count_zeros:
            zeros.append(torch.eq(work, 0, out=self.view(block.numel(), dtype, slot=1)).sum())
        # x - x is 0 where x is finite and NaN where it is not; only NaN differs from itself.
        torch.sub(work, work, out=work)
        stats.append(torch.ne(work, work, out=work).sum())
        return stats + zeros


class _Block:
    """Pieces of parameters that go through cache together; ``owners`` says which row each piece is of."""

    def __init__(self, scratch: _Scratch) -> None:
        self._scratch = scratch
        self.pieces: list[Row] = []
        self.owners: list[int] = []
        self.numel = 0

    def add(self, owner: int, piece: Row) -> None:
        self.owners.append(owner)
        self.pieces.append(piece)
        self.numel += piece[0].numel()

    def column(self, index: int) -> list[Tensor]:
        return [piece[index] for piece in self.pieces]

    def unscaled(self, coefficient: Tensor) -> list[Tensor]:
        """Return the gradients times ``coefficient`` in the main params' dtype, in scratch."""
        buffer = self._scratch.view(self.numel, self.pieces[0][0].dtype)
        grads = list(buffer.split([piece[0].numel() for piece in self.pieces]))
        torch._foreach_copy_(grads, self.column(1))
        buffer.mul_(coefficient)
        return grads

    def write_back_(self) -> None:
        copied = [piece for piece in self.pieces if piece[2].dtype != piece[0].dtype]
        if copied:
            torch._foreach_copy_([piece[2] for piece in copied], [piece[0] for piece in copied])


def _blocks(rows: list[Row]) -> Iterator[_Block]:
    """Cut rows into blocks that fit the scratch, one main dtype to a block, in order."""
    if not rows:
        return
    scratch = _Scratch(rows[0][0].device)
    block = _Block(scratch)
    for owner, row in enumerate(rows):
        for piece in zip(*(tensor.split(scratch.block) for tensor in row), strict=True):
            if not piece[0].numel():
                continue
            full = block.numel + piece[0].numel() > scratch.block
            if block.pieces and (full or block.pieces[0][0].dtype != piece[0].dtype):
                yield block
                block = _Block(scratch)
            block.add(owner, list(piece))
    if block.pieces:
        yield block


def _split(operands: Operands, names: list[str]) -> tuple[list[Row], list[Tensor], Operands]:
    """Return flat rows and steps of what fused kernels can take, and the operands of what they cannot."""
    rows: list[Row] = []
    taken: list[int] = []
    rest: list[int] = []
    for index, (main, grad, model) in enumerate(zip(operands.main, operands.grad, operands.model, strict=True)):
        state = [operands.state[name][index] for name in names]
        row = _flat([main, grad, model, *state]) if all(s.dtype == main.dtype for s in state) else None
        if row is None:
            rest.append(index)
        else:
            rows.append(row)
            taken.append(index)
    return rows, [operands.step[i] for i in taken] if operands.step else [], operands.pick(rest)


def _flat(tensors: list[Tensor]) -> Row | None:
    """Return 1-D views in memory order if all tensors are dense with the same strides, else None."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(-1) for tensor in tensors]
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda dim: strides[dim], reverse=True)
    permuted = [tensor.permute(order) for tensor in tensors]
    if all(tensor.stride() == strides for tensor in tensors) and permuted[0].is_contiguous():
        return [tensor.view(-1) for tensor in permuted]
    return None
