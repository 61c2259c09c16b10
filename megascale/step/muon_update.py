"""Muon's update. It reads the decision on the device: a skipped step changes nothing, and the host does not wait."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import is_not
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from megascale.config import StepConfig
from megascale.kernels import Backend, Decision, Operands
from megascale.kernels.newton_schulz import iteration_dtype, orthogonalize
from megascale.kernels.protocol import flags_at, runs_of
from megascale.kernels.rounding import DECODED_NUMEL
from megascale.main_params.update_unit import UpdateUnit
from megascale.rules import MUON, MuonHyper
from megascale.step.kernel_update import KernelUpdate
from megascale.step.matrix_exchange import Cut, MatrixExchange, cuts_of
from megascale.step.update import Kernel, PendingUpdate
from megascale.utils.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _MatrixSet(NamedTuple):
    """Matrices that are updated together.

    Attributes:
        indices: of their main params, among those of a part.
        shapes: of the whole matrices.
        exchange: brings each to its owner, and the result back. None: this rank has all of them.
    """

    indices: list[int]
    shapes: list[torch.Size]
    exchange: MatrixExchange | None


_Part = tuple[list[int], Operands, list[_MatrixSet]]
"""Matrices of a unit that are decoded together, where main params are held as remainders; else all. Indices of their
main params, among those of the unit; operands, with memory for decoded main params; sets, in the order of their update.
"""


class _MuonKernel:
    """Updates the matrices of a unit, one set after the other.

    Args:
        backend: for what it does in a pass over memory.
        dtype: of the iterations; None: the device's.
    """

    def __init__(self, backend: Backend, dtype: torch.dtype | None) -> None:
        self._backend = backend
        self._dtype = dtype
        self.decoded: dict[torch.device, Tensor] = {}

    def run(self, matrices: Sequence[Tensor], operands: Operands, hyper: MuonHyper, decision: Decision) -> Tensor:
        """See :data:`megascale.step.update.Kernel`. ``matrices``: the main params, of which some may be DTensors."""
        skipped = (decision.found_inf != 0).reshape(())
        if skipped.device.type == "cpu" and skipped.item():
            return torch.zeros(len(operands.main), dtype=torch.bool, device="cpu")
        there = [index for index, grad in enumerate(operands.grad) if grad is not None]
        kept = operands.tables.get(_MuonKernel)
        # Parts serve while the same gradients are there. Decoded main params of all units share memory, which grows.
        if kept is None or kept[0] != there or kept[1] is not self.decoded.get(skipped.device):
            parts = self._parts(matrices, operands, there)
            kept = operands.tables[_MuonKernel] = there, self.decoded.get(skipped.device), parts
        flags = []
        for indices, part, sets in kept[2]:
            part.grad = [operands.grad[index] for index in indices]
            try:
                if part.remainder:
                    self._backend.decode_(part)
                for together in sets:
                    self._update(part.pick(together.indices), together, hyper, decision, skipped)
            finally:
                part.grad = ()  # parts are kept
            if part.remainder:
                flags.append(self._backend.encode_(part, decision.found_inf))
            elif any(map(is_not, part.main, part.model)):
                flags.append(self._backend.write_back_(part))
            else:
                flags.append(torch.zeros(len(indices), dtype=torch.bool, device=skipped.device))
        return flags_at(there, torch.cat(flags), len(operands.main))

    def _parts(self, matrices: Sequence[Tensor], operands: Operands, there: list[int]) -> list[_Part]:
        """Return the parts of a unit. ``there``: indices of the parameters that have a gradient."""
        runs = [there]
        if operands.remainder:
            runs = [
                [there[at] for at in run] for run in runs_of([operands.model[index] for index in there], DECODED_NUMEL)
            ]
        parts: list[_Part] = [
            (indices, operands.pick(indices), _sets([matrices[index] for index in indices])) for indices in runs
        ]
        if operands.remainder:
            device = operands.model[0].device
            # Each begins at a multiple of 16 elements, as kernels read vectors.
            starts = [[0, *accumulate(-(-model.numel() // 16) * 16 for model in part.model)] for _, part, _ in parts]
            memory, numel = self.decoded.get(device), max(ends[-1] for ends in starts)
            if memory is None or len(memory) < numel:
                memory = self.decoded[device] = torch.empty(numel, dtype=torch.float32, device=device)
            for (_, part, _), begins in zip(parts, starts, strict=True):
                part.main = [
                    memory.as_strided(model.shape, torch.empty_like(model, device="meta").stride(), start)
                    for model, start in zip(part.model, begins, strict=False)
                ]
        return parts

    def _update(
        self, operands: Operands, matrices: "_MatrixSet", hyper: MuonHyper, decision: Decision, skipped: Tensor
    ) -> None:
        """Update a set of matrices, in the order of operations of torch.optim.Muon."""
        mains, buffers = operands.main, operands.state["momentum_buffer"]
        there = [grad for grad in operands.grad if grad is not None]  # all
        grads = self._backend.unscale(there, mains, decision.coefficient)
        momenta = [
            buffer.to(grad.dtype).lerp(grad, 1 - hyper.momentum) for buffer, grad in zip(buffers, grads, strict=True)
        ]
        raw = momenta
        if hyper.nesterov:
            raw = [grad.lerp_(momentum, hyper.momentum) for grad, momentum in zip(grads, momenta, strict=True)]
        dtype = self._dtype or iteration_dtype(mains[0].device)
        rounded = [direction.to(dtype) for direction in raw]
        del grads, raw  # frees 4 bytes an element before the iterations
        exchange = matrices.exchange
        factors = [
            orthogonalize(whole, hyper.coefficients, hyper.eps)
            for whole in (rounded if exchange is None else exchange.collect(rounded))
        ]
        directions = factors if exchange is None else exchange.give_back(factors, rounded[0])
        del rounded, factors
        for main, direction, shape in zip(mains, directions, matrices.shapes, strict=True):
            shrunk = main * (1 - hyper.lr * hyper.weight_decay)
            lr = hyper.lr_of(shape)
            # torch's bits, except where the rate is a tensor on an accelerator, which the host must not read.
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                shrunk.add_(direction.to(main.dtype) * -lr)
            else:
                shrunk.add_(direction, alpha=-float(lr))
            _write_unless(skipped, main, shrunk)
        for buffer, momentum in zip(buffers, momenta, strict=True):
            _write_unless(skipped, buffer, momentum.to(buffer.dtype))


class MuonUpdate(KernelUpdate):
    """torch.optim.Muon's rule, also with a triple of coefficients for each iteration.

    The momentum of DTensors is updated in pieces, where it lies. The pieces of each update's direction travel to the
    matrix's owner, who orthogonalizes it, and back, in the dtype of the iterations. If the optimizer has step hooks, or
    DTensors whose cuts :func:`cuts_of` does not know, its own ``step()`` runs instead.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, config: StepConfig) -> None:
        super().__init__(optimizer, backend, config, MUON)
        self._dtype = config.muon_ns_dtype
        self._muon = _MuonKernel(backend, self._dtype)

    @override
    def kernel_of(self, unit: UpdateUnit, part: slice) -> Kernel:
        return partial(self._muon.run, [param.main for param in unit.params[part]])

    @override
    def release_memory(self, units: Sequence[UpdateUnit]) -> None:
        super().release_memory(units)
        self._muon.decoded.clear()

    @override
    def update_signature(self) -> str:
        device = next((param.device for group in self.optimizer.param_groups for param in group["params"]), None)
        dtype = self._dtype or (None if device is None else iteration_dtype(device))
        return f"{super().update_signature()}, iterations in {dtype}"

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        new = [pending.unit for pending in updates if pending.unit.calls is None]
        if any(cuts_of(param.main) is None for unit in new for param in unit.params):
            return self.prepare_own_step(updates, "DTensors whose pieces cannot be joined: cut them otherwise")
        return super().prepare(updates)


def _sets(mains: Sequence[Tensor]) -> list[_MatrixSet]:
    """Return which matrices are updated together: those that share an exchange; every other one alone.

    One by one also where many have one shape: a library may multiply a batch of another size by another kernel,
    and how many a rank has depends on the number of ranks, which no bit may depend on.
    """
    found: list[tuple[list[int], MatrixExchange | None]] = [
        ([index], None) for index, main in enumerate(mains) if main.numel() and not cuts_of(main)
    ]
    by_groups: defaultdict[tuple[ProcessGroup, ...], list[tuple[int, DTensor, list[Cut]]]] = defaultdict(list)
    for index, main in enumerate(mains):
        if is_dtensor(main) and (cuts := cuts_of(main)):
            groups = tuple(main.device_mesh.get_group(cut.mesh_dim) for cut in cuts)
            by_groups[groups].append((index, main, cuts))
    for cut in by_groups.values():
        indices, matrices, cuts_of_each = map(list, zip(*cut, strict=True))
        found.append((indices, MatrixExchange(matrices, cuts_of_each)))
    return [_MatrixSet(indices, [mains[index].shape for index in indices], exchange) for indices, exchange in found]


def _write_unless(skipped: Tensor, target: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``target`` unless the step is skipped. On a CPU the caller has made sure that it is not."""
    target.copy_(value if skipped.device.type == "cpu" else torch.where(skipped, target, value))
