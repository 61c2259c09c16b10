"""Muon's update. It reads the decision on the device: a skipped step changes nothing, and the host does not wait."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from megascale.config import StepConfig
from megascale.kernels import Backend, Decision, Operands
from megascale.kernels.newton_schulz import iteration_dtype, orthogonalize
from megascale.kernels.protocol import flags_at
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.rules import MUON, MuonHyper
from megascale.step.kernel_update import KernelUpdate
from megascale.step.matrix_exchange import Cut, MatrixExchange, cuts_of
from megascale.step.update import PendingUpdate, Prepared
from megascale.utils.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _MatrixSet(NamedTuple):
    """Matrices that are updated together.

    Attributes:
        indices: of their main params, among those of the unit.
        shapes: of the whole matrices.
        exchange: brings each to its owner, and the result back. None: this rank has all of them.
    """

    indices: list[int]
    shapes: list[torch.Size]
    exchange: MatrixExchange | None


class MuonUpdate(KernelUpdate):
    """torch.optim.Muon's rule, also with a triple of coefficients for each iteration.

    The momentum of DTensors is updated in pieces, where it lies. The pieces of each update's direction travel to the
    matrix's owner, who orthogonalizes it, and back, in the dtype of the iterations. If the optimizer has step hooks, or
    DTensors that :func:`cuts_of` refuses, its own ``step()`` runs instead.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, config: StepConfig) -> None:
        super().__init__(optimizer, backend, config, MUON)
        self._dtype = config.muon_ns_dtype
        self._supported: WeakKeyDictionary[UpdateUnit, bool] = WeakKeyDictionary()
        # Of the newest set of matrices that have a gradient: its indices, and which are updated together.
        self._plans: WeakKeyDictionary[Operands, tuple[list[int], list[_MatrixSet]]] = WeakKeyDictionary()

    @override
    def update_signature(self) -> str:
        device = next((param.device for group in self.optimizer.param_groups for param in group["params"]), None)
        dtype = self._dtype or (None if device is None else iteration_dtype(device))
        return f"{super().update_signature()}, iterations in {dtype}"

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        for unit in (pending.unit for pending in updates):
            if unit not in self._supported:
                self._supported[unit] = all(_is_supported(param.main) for param in unit.params)
        if not all(self._supported[pending.unit] for pending in updates):
            return self.general.prepare(updates)
        return super().prepare(updates)

    @override
    def run(self, prepared: Prepared, hyper: MuonHyper, decision: Decision) -> Tensor:
        """Update the matrices, one set after the other."""
        operands = prepared.operands
        overflowed = torch.zeros(len(operands.main), dtype=torch.bool, device=decision.found_inf.device)
        skipped = (decision.found_inf != 0).reshape(())
        if skipped.device.type == "cpu" and skipped.item():
            return overflowed
        there = [index for index, grad in enumerate(operands.grad) if grad is not None]
        planned, plan = self._plans.get(operands, ([], []))
        if planned != there:
            plan = self._plan(prepared.params, there)
            self._plans[operands] = there, plan
        for matrices in plan:
            self._update(operands.pick(matrices.indices), matrices, hyper, decision, skipped)
        copies = [index for index in there if operands.main[index] is not operands.model[index]]
        if not copies:
            return overflowed
        flags = self.backend.write_back_([operands.main[i] for i in copies], [operands.model[i] for i in copies])
        return flags_at(copies, flags, len(operands.main))

    def _plan(self, params: Sequence[MainParam], there: Sequence[int]) -> list["_MatrixSet"]:
        """Return which matrices are updated together: those that share an exchange; every other one alone.

        ``there``: indices of the parameters that have a gradient.

        One by one also where many have one shape: a library may multiply a batch of another size by another kernel,
        and how many a rank has depends on the number of ranks, which no bit may depend on.
        """
        mains = {index: params[index].main for index in there}
        found: list[tuple[list[int], MatrixExchange | None]] = [
            ([index], None) for index, main in mains.items() if main.numel() and not cuts_of(main)
        ]
        found += [(indices, exchange) for exchange, indices in _exchanges(mains)]
        return [_MatrixSet(indices, [mains[index].shape for index in indices], exchange) for indices, exchange in found]

    def _update(
        self, operands: Operands, matrices: "_MatrixSet", hyper: MuonHyper, decision: Decision, skipped: Tensor
    ) -> None:
        """Update a set of matrices, in the order of operations of torch.optim.Muon."""
        mains, buffers = operands.main, operands.state["momentum_buffer"]
        there = [grad for grad in operands.grad if grad is not None]  # all
        grads = self.backend.unscale(there, mains, decision.coefficient)
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


def _is_supported(main: Tensor) -> bool:
    """Return whether a matrix is whole here, or cut in a way that :class:`MatrixExchange` can join."""
    try:
        cuts_of(main)
    except ValueError:
        return False
    return True


def _exchanges(mains: Mapping[int, Tensor]) -> list[tuple[MatrixExchange, list[int]]]:
    """Return one exchange, with the indices of its matrices, for each list of groups that matrices are cut over."""
    by_groups: defaultdict[tuple[ProcessGroup, ...], list[tuple[int, DTensor, list[Cut]]]] = defaultdict(list)
    for index, main in mains.items():
        if is_dtensor(main) and (cuts := cuts_of(main)):
            groups = tuple(main.device_mesh.get_group(cut.mesh_dim) for cut in cuts)
            by_groups[groups].append((index, main, cuts))
    return [
        (MatrixExchange([main for _, main, _ in held], [cuts for _, _, cuts in held]), [index for index, _, _ in held])
        for held in by_groups.values()
    ]


def _write_unless(skipped: Tensor, target: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``target`` unless the step is skipped. On a CPU the caller has made sure that it is not."""
    target.copy_(value if skipped.device.type == "cpu" else torch.where(skipped, target, value))
