"""Muon, with the decision read on the device: a step that is skipped changes nothing, and the host does not wait."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from megascale.config import MUON_ADJUST_LR_FNS, OptimizerConfig
from megascale.errors import ArgumentError
from megascale.kernels import Backend, Decision, Operands
from megascale.kernels.newton_schulz import Coefficients, iteration_dtype, iterations, orthogonalize
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.parallel import is_expert
from megascale.step.kernel_state import number, rate
from megascale.step.kernel_update import KernelUpdate
from megascale.step.matrix_exchange import Cut, Exchange, MatrixExchange, WorkSplit, cuts_of
from megascale.step.update import PendingUpdate, Prepared
from megascale.utils import validate
from megascale.utils.collectives import group_size
from megascale.utils.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MOST_ITERATIONS = 99


@dataclass(frozen=True)
class MuonHyper:
    """Hyperparameters of Muon, by the names of torch.optim.Muon.

    Attributes:
        coefficients: one triple per iteration.
    """

    lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[Coefficients, ...]
    eps: float
    adjust_lr_fn: str | None

    def lr_of(self, shape: torch.Size) -> float | Tensor:
        """Return the learning rate of a matrix: torch's adjustment of it to the matrix's shape."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, columns)))
        return self.lr * math.sqrt(max(1, rows / columns))


class _Together(NamedTuple):
    """Matrices that are updated together.

    Attributes:
        indices: of their main params in the call.
        shapes: of the whole matrices.
        exchange: makes them whole where this rank has a piece of each, or has others share the work.
    """

    indices: list[int]
    shapes: list[torch.Size]
    exchange: Exchange | None


class MuonUpdate(KernelUpdate):
    """torch.optim.Muon, and Muon with coefficients for each iteration.

    DTensors keep their momentum where it is; directions travel to one owner of each whole matrix and back, in the dtype
    of the iterations. Where DTensors are cut in ways that :func:`cuts_of` refuses, or the optimizer has step hooks, its
    own ``step()`` runs instead.
    """

    fuses_remainders = False
    numbers = ("momentum", "weight_decay", "eps")
    flags = ("nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        config: OptimizerConfig,
        data_parallel: ProcessGroup | None = None,
    ) -> None:
        super().__init__(optimizer, backend, config)
        self._split_over = data_parallel if config.muon_split_work and group_size(data_parallel) > 1 else None
        self._dtype, self._is_batched = config.muon_ns_dtype, config.muon_batched
        self._movable: WeakKeyDictionary[UpdateUnit, bool] = WeakKeyDictionary()
        self._plans: WeakKeyDictionary[Operands, list[_Together]] = WeakKeyDictionary()

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        for unit in (pending.unit for pending in updates):
            if unit not in self._movable:
                self._movable[unit] = all(_is_movable(param.main) for param in unit.params)
        if not all(self._movable[pending.unit] for pending in updates):
            return self._general.prepare(updates)
        return super().prepare(updates)

    @override
    def state_names(self, options: dict[str, Any]) -> list[str]:
        return ["momentum_buffer"]

    @override
    def counts_steps(self, options: dict[str, Any]) -> bool:
        return False

    @override
    def hyper(self, options: dict[str, Any]) -> MuonHyper:
        if options["adjust_lr_fn"] is not None:
            validate.one_of("adjust_lr_fn of a param group", options["adjust_lr_fn"], MUON_ADJUST_LR_FNS)
        steps = validate.integer("ns_steps of a param group", options["ns_steps"], minimum=0, maximum=MOST_ITERATIONS)
        return MuonHyper(
            lr=rate(options),
            weight_decay=number(options, "weight_decay"),
            momentum=number(options, "momentum"),
            nesterov=bool(options["nesterov"]),
            coefficients=iterations(_triples(options), steps),
            eps=number(options, "eps"),
            adjust_lr_fn=options["adjust_lr_fn"],
        )

    @override
    def run(self, prepared: Prepared, hyper: MuonHyper, decision: Decision) -> Tensor:
        """Update matrix by matrix, or batch by batch; those that are cut over the same ranks together."""
        operands = prepared.operands
        overflowed = torch.zeros(len(operands.main), dtype=torch.bool, device=decision.found_inf.device)
        skipped = (decision.found_inf != 0).reshape(())
        if skipped.device.type == "cpu" and skipped.item():
            return overflowed
        if operands not in self._plans:
            self._plans[operands] = self._plan(prepared.params)
        for together in self._plans[operands]:
            self._update(operands.pick(together.indices), together, hyper, decision, skipped)
        copies = [index for index, main in enumerate(operands.main) if main is not operands.model[index]]
        if copies:
            flags = self.backend.write_back_([operands.main[i] for i in copies], [operands.model[i] for i in copies])
            if len(copies) == len(operands.main):
                return flags
            overflowed[copies] = flags
        return overflowed

    def _plan(self, params: Sequence[MainParam]) -> list["_Together"]:
        """Return which matrices are updated together: those that travel together, else one by one or by shape."""
        mains = [param.main for param in params]
        held = [index for index, main in enumerate(mains) if main.numel() and not cuts_of(main)]
        split = [i for i in held if self._split_over is not None and not is_expert(params[i].model)]
        alone = sorted({*held} - {*split})
        lists = _by_shape(mains, alone) if self._is_batched else [[index] for index in alone]
        found: list[tuple[list[int], Exchange | None]] = [(indices, None) for indices in lists]
        found += [(indices, exchange) for exchange, indices in _exchanges(mains)]
        if self._split_over is not None and split:
            found.append((split, WorkSplit([mains[index].shape for index in split], self._split_over)))
        return [_Together(indices, [mains[index].shape for index in indices], exchange) for indices, exchange in found]

    def _update(
        self, operands: Operands, together: "_Together", hyper: MuonHyper, decision: Decision, skipped: Tensor
    ) -> None:
        """Update matrices, in the order of operations of torch.optim.Muon."""
        mains, buffers = operands.main, operands.state["momentum_buffer"]
        grads = self.backend.unscale(list(operands.grad), mains, decision.coefficient)
        moved = [
            buffer.to(grad.dtype).lerp(grad, 1 - hyper.momentum) for buffer, grad in zip(buffers, grads, strict=True)
        ]
        moving = moved
        if hyper.nesterov:
            moving = [grad.lerp_(momentum, hyper.momentum) for grad, momentum in zip(grads, moved, strict=True)]
        dtype = self._dtype or iteration_dtype(mains[0].device)
        rounded = [direction.to(dtype) for direction in moving]
        del grads, moving  # 4 bytes an element that nobody reads again
        directions = self._directions(rounded, together.exchange, hyper)
        del rounded
        for main, direction, shape in zip(mains, directions, together.shapes, strict=True):
            shrunk = main * (1 - hyper.lr * hyper.weight_decay)
            _write_unless(skipped, main, _minus(shrunk, direction, hyper.lr_of(shape)))
        for buffer, momentum in zip(buffers, moved, strict=True):
            _write_unless(skipped, buffer, momentum.to(buffer.dtype))

    def _directions(self, rounded: Sequence[Tensor], exchange: Exchange | None, hyper: MuonHyper) -> list[Tensor]:
        """Return this rank's part of each matrix's orthogonal factor, from its part of the matrix."""
        if exchange is None:
            return self._orthogonalize(rounded, hyper)
        wholes = self._orthogonalize(exchange.collect(rounded), hyper)
        return exchange.give_back(wholes, rounded[0])

    def _orthogonalize(self, matrices: Sequence[Tensor], hyper: MuonHyper) -> list[Tensor]:
        """Return the orthogonal factor of each, one by one or by batches of a shape."""
        if not self._is_batched:
            return [orthogonalize(matrix, hyper.coefficients, hyper.eps) for matrix in matrices]
        found: dict[int, Tensor] = {}
        for indices in _by_shape(matrices, range(len(matrices))):
            together = torch.stack([matrices[index] for index in indices])
            found |= zip(indices, orthogonalize(together, hyper.coefficients, hyper.eps).unbind(), strict=True)
        return [found[index] for index in range(len(matrices))]


def _is_movable(main: Tensor) -> bool:
    """Return whether a matrix is whole here, or cut in a way that :class:`MatrixExchange` can send."""
    try:
        cuts_of(main)
    except ValueError:
        return False
    return True


def _exchanges(mains: Sequence[Tensor]) -> list[tuple[MatrixExchange, list[int]]]:
    """Return an exchange for all matrices that are cut over the same dimensions of a mesh, and which these are."""
    together: defaultdict[tuple[ProcessGroup, ...], list[tuple[int, DTensor, list[Cut]]]] = defaultdict(list)
    for index, main in enumerate(mains):
        if is_dtensor(main) and (cuts := cuts_of(main)):
            groups = tuple(main.device_mesh.get_group(cut.mesh_dim) for cut in cuts)
            together[groups].append((index, main, cuts))
    return [
        (MatrixExchange([main for _, main, _ in held], [cuts for _, _, cuts in held]), [index for index, _, _ in held])
        for held in together.values()
    ]


def _by_shape(matrices: Sequence[Tensor], indices: Iterable[int]) -> list[list[int]]:
    """Return the indices of matrices of the same shape and dtype together."""
    by_shape: defaultdict[tuple[torch.Size, torch.dtype], list[int]] = defaultdict(list)
    for index in indices:
        by_shape[matrices[index].shape, matrices[index].dtype].append(index)
    return list(by_shape.values())


def _minus(main: Tensor, direction: Tensor, lr: float | Tensor) -> Tensor:
    """Return ``main - lr * direction``, with torch's bits but where the rate is a tensor that the host may not read."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return main.add_(direction.to(main.dtype) * -lr)
    return main.add_(direction, alpha=-float(lr))


def _write_unless(skipped: Tensor, target: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``target`` where the step lands. On a CPU the caller knows that it does."""
    target.copy_(value if skipped.device.type == "cpu" else torch.where(skipped, target, value))


def _triples(options: Mapping[str, Any]) -> list[Coefficients]:
    """Return ``ns_coefficients``: three numbers, or such a triple for each iteration."""
    value = options["ns_coefficients"]
    rows = [value] if isinstance(value, Collection) and all(isinstance(one, int | float) for one in value) else value
    if not isinstance(rows, Collection) or not rows or not all(_is_triple(row) for row in rows):
        raise ArgumentError(
            "ns_coefficients of a param group must be three numbers, or a list of such triples, one for each "
            f"iteration; got {value!r}"
        )
    return [(float(a), float(b), float(c)) for a, b, c in rows]


def _is_triple(row: Any) -> bool:
    return isinstance(row, Collection) and len(row) == 3 and all(isinstance(one, int | float) for one in row)
