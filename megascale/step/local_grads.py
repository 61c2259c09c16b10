"""Finishes gradient reduction and collects a step's local gradients, from ``param.grad`` and main grads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megascale.errors import ArgumentError, GradientError, MegascaleError, UsageError
from megascale.grad_sync.grad_hook import owner_of, require_unowned
from megascale.grad_sync.reduced_grads import ReducedGrads
from megascale.grad_sync.usable_grads import gradient_error
from megascale.kernels import (
    GradWeights,
    MemoryRecord,
    TensorList,
    stats_dtype,
    tensor_fault,
)
from megascale.main_params.base import MainParams
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.parallel import ParallelGroups
from megascale.step.grad_stats import Holders
from megascale.step.update import PendingUpdate
from megascale.utils.collectives import redistribute_like
from megascale.utils.dtensors import is_dtensor, to_local
from megascale.utils.identity import are_same
from megascale.utils.transfer import to_device_async

REMEDY = "give that GradSync to this optimizer (grad_sync=...), or drop it, or call its detach()"

ReplicaSet = tuple[str, tuple[int, ...], str]
"""What ranks are called that hold the same gradient, which they are, and the parameter's name."""


class _MainGrads(NamedTuple):
    """Cached main grads of a unit, valid as long as ``memory`` holds."""

    grads: TensorList
    memory: MemoryRecord


class _Measured(NamedTuple):
    """The parameters that a step measures, and the weights of the statistics of their gradients."""

    params: list[MainParam]
    weights: GradWeights


@dataclass
class Collected:
    """Local gradients of one step.

    Attributes:
        updates: per unit in which a parameter has a gradient, what the update needs.
        params: of all units, if one of them has a gradient; else none.
        grads: their local gradients, which are measured.
        weights: of each gradient's statistics.
        error: why this rank cannot step; the lists are empty then.
    """

    updates: list[PendingUpdate]
    params: list[MainParam]
    grads: TensorList
    weights: GradWeights
    error: Exception | None


class ReadyGrads:
    """Collects gradients; caches their statistics' weights while the units are the same.

    Attributes:
        weights: those of the newest step; None before the first.
    """

    def __init__(
        self,
        groups: ParallelGroups,
        device: torch.device,
        grad_sync: ReducedGrads | None = None,
        *,
        sharded: bool = False,
        replicas_may_differ: bool = False,
    ) -> None:
        self._grad_sync = grad_sync
        self._replicas_may_differ = replicas_may_differ
        self._holders = Holders(groups, sharded=sharded)
        self._device = device
        self.weights: GradWeights | None = None
        self._units: Sequence[UpdateUnit] = ()
        self._measured: _Measured | None = None
        self._kept: WeakKeyDictionary[UpdateUnit, _MainGrads] = WeakKeyDictionary()
        self._joined = list[TensorList](), TensorList()  # of main grads: those of each unit, and all

    def validate_param(self, param: MainParam) -> None:
        """Raise ArgumentError for a parameter whose gradient goes elsewhere or that ``grad_stats`` cannot agree on."""
        if self._is_taken_elsewhere(param):
            require_unowned([(param.name, param.model)], REMEDY)
        try:
            self._holders.of(param.model)
        except ArgumentError as error:
            raise ArgumentError(f"parameter {param.name!r}: {error}") from None

    def collect(self, param_groups: Sequence[dict[str, Any]], main_params: MainParams) -> Collected:
        """Return the gradients there are, after :meth:`finish`. Parameters without a gradient take no part."""
        units, measured = main_params.units(), self._measured
        if measured is None or units is not self._units:
            self._units, params = units, [param for unit in units for param in unit.params]
            measured = self._measured = _Measured(params, self._weigh(params))
        found, updates = list[TensorList](), list[PendingUpdate]()
        for unit in units:
            grads = self._grads_of(unit)
            if isinstance(grads, MegascaleError):
                return self.failed(grads)
            found.append(grads)
            if grads.num_there or unit.counted:
                updates.append(PendingUpdate(param_groups[unit.group], unit, grads))
        self.weights, (lists, joined) = measured.weights, self._joined
        if not (lists and are_same(lists, found)):
            joined = TensorList.joined(found)
            kept = [self._kept[unit].grads for unit in units if unit in self._kept]
            if are_same(kept, found):  # all are main grads, which live as long as their GradSync
                self._joined = found, joined
        return Collected(updates, measured.params if joined.num_there else [], joined, measured.weights, None)

    def grad_of(self, param: MainParam) -> Tensor | None:
        """Return what this rank has of a gradient, as it is: the main grad, or the local part of ``param.grad``."""
        grad = self._main_grad(param)
        if grad is None:
            grad = param.model.grad
        return None if grad is None else to_local(grad)

    def finish(self, main_params: MainParams) -> MegascaleError | None:
        """Finish reductions, also on a failed rank, as others wait for it; return the error of an unusable gradient.

        A Partial DTensor gradient is replaced by the reduced one.
        """
        error: MegascaleError | None = None
        if self._grad_sync is not None:
            try:
                self._grad_sync.finish()
            except MegascaleError as caught:
                error = caught
        for unit in main_params.units():
            for param in unit.params if unit.has_dtensors else ():
                grad, model = param.model.grad, param.model
                if is_dtensor(grad) and is_dtensor(model) and grad.placements != model.placements:
                    model.grad = redistribute_like(grad, model)
        return error

    def failed(self, error: Exception) -> Collected:
        """Return an empty collection with ``error``, for a rank whose step cannot be taken."""
        self.weights = self._weigh([])
        return Collected([], [], TensorList(), self.weights, error)

    def _grads_of(self, unit: UpdateUnit) -> TensorList | MegascaleError:
        """Return the gradients of a unit. An error for one that no kernel can read, or that another GradSync has."""
        found: TensorList | MegascaleError | None = None
        if self._grad_sync is not None:
            found = self._synced(unit)
        if found is None and not unit.has_dtensors and not (unit in self._kept and self._kept[unit].grads.num_there):
            found = unit.grads.read()  # all param.grad at once, if kernels can read all there are
        if found is None:
            found = self._one_by_one(unit)
        if not isinstance(found, MegascaleError):
            for index in found.missing:
                if self._is_taken_elsewhere(param := unit.params[index]):
                    return UsageError(f"the gradient of {param.name!r} was taken by a GradSync in backward; {REMEDY}")
        return found

    def _synced(self, unit: UpdateUnit) -> TensorList | MegascaleError | None:
        """Return the main grads of a unit, which are cached. None if a parameter has a gradient beside them."""
        kept = self._kept.get(unit)
        if kept is None or not kept.memory.holds():
            grads = list(map(self._main_grad, unit.params))
            for param, grad in zip(unit.params, grads, strict=True):
                if grad is not None and not self._is_in_place(param, grad):
                    return _misplaced(param.name)
            memory = MemoryRecord([grad for grad in grads if grad is not None])
            kept = self._kept[unit] = _MainGrads(self._listed(unit, grads), memory)
        if any(unit.params[index].model.grad is not None for index in kept.grads.missing):
            return None
        return kept.grads

    def _listed(self, unit: UpdateUnit, grads: list[Tensor | None]) -> TensorList:
        """Return the local gradients of a unit. A missing one has the form of its main grad, or else of its weight."""
        filled: list[Tensor] = []
        for param, grad in zip(unit.params, grads, strict=True):
            if grad is None and self._grad_sync is not None:
                grad = self._grad_sync.local_grad(param.model)
            filled.append(param.part.detach() if grad is None else grad)
        return TensorList(grads, filled=filled)

    def _is_in_place(self, param: MainParam, grad: Tensor) -> bool:
        """Whether a main grad still lies in its bucket, as it was created."""
        fits = grad.shape == to_local(param.main).shape and grad.dtype.is_floating_point
        in_bucket = self._grad_sync is None or self._grad_sync.reduces(grad)
        return fits and in_bucket and tensor_fault(grad) is None

    def _main_grad(self, param: MainParam) -> Tensor | None:
        """Return the main grad. A parameter that was frozen since takes no part."""
        if self._grad_sync is None or not param.model.requires_grad:
            return None
        return self._grad_sync.local_grad(param.model)

    def _one_by_one(self, unit: UpdateUnit) -> TensorList | MegascaleError:
        """Return the gradients, or main grads, of a unit. An error for one that no kernel can read."""
        grads: list[Tensor | None] = []
        for param in unit.params:
            grad, model = self._main_grad(param), param.model
            if grad is not None and not self._is_in_place(param, grad):
                return _misplaced(param.name)
            if grad is None and model.grad is not None:
                error = gradient_error(param.name, model.grad, model)
                if error is not None:
                    return error
                grad = to_local(model.grad)
            grads.append(grad)
        return self._listed(unit, grads)

    def _is_taken_elsewhere(self, param: MainParam) -> bool:
        """Return whether a live GradSync, not the one that was given, takes the gradients of ``param``."""
        given: object = self._grad_sync
        return owner_of(param.model) not in (None, given)

    def _weigh(self, params: Sequence[MainParam]) -> GradWeights:
        """Return the weights of the gradients' statistics."""
        shares, contrasts = [], []
        for param in params:
            weight = self._holders.of(param.model)
            shares.append(weight.share)
            is_compared = self._are_data_replicas_compared(param)
            contrasts.append(weight.contrast if is_compared else weight.tensor_contrast)
        compares = any(contrasts) and not self._replicas_may_differ
        return GradWeights(self._column(shares), self._column(contrasts) if compares else None)

    def replica_squares(self, params: Sequence[MainParam], sum_squares: Tensor | None) -> dict[ReplicaSet, float]:
        """Return the sum of squares of each gradient that other ranks should hold, too. The host waits for it.

        ``sum_squares``: those of all ``params``, in their order; None: there are none.
        """
        found: dict[ReplicaSet, float] = {}
        for param, squares in zip(params, [] if sum_squares is None else sum_squares.tolist(), strict=True):
            for kind, ranks in self._holders.replica_sets(param.model).items():
                if kind == "tensor-parallel" or self._are_data_replicas_compared(param):
                    found[kind, tuple(sorted(ranks)), param.name] = squares
        return found

    def _are_data_replicas_compared(self, param: MainParam) -> bool:
        """Whether a step compares the gradients of data-parallel ranks: all but the shards of a reduction."""
        sync = self._grad_sync
        return sync is None or sync.compares_replicas or sync.main_grad(param.model) is None

    def _column(self, values: list[float]) -> Tensor:
        return to_device_async(torch.tensor(values, dtype=stats_dtype(self._device), device="cpu"), self._device)


def _misplaced(name: str) -> GradientError:
    return GradientError(
        f"the main grad of {name!r} was given other memory or another shape, where no reduction reaches it; write into "
        "the tensor in place"
    )
