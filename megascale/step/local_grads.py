"""Finishes gradient reduction and collects a step's local gradients, from ``param.grad`` and main grads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
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


class Found(NamedTuple):
    """Local gradients of a unit.

    Attributes:
        unit: of the parameters that have a gradient.
        grads: in its order.
        whole: the unit that was searched.
        indices: of its parameters that have a gradient; None: all.
    """

    unit: UpdateUnit
    grads: TensorList
    whole: UpdateUnit
    indices: list[int] | None = None


class _MainGrads(NamedTuple):
    """Cached main grads of a unit, valid as long as ``memory`` holds. ``indices``: of the parameters that have one."""

    grads: TensorList
    indices: list[int]
    memory: MemoryRecord


@dataclass
class _Measured:
    """What is measured of some units, and the gradients that ``given`` were.

    Attributes:
        owned: by unit, the indices of the parameters of which this rank owns elements.
        are_whole: by unit, whether these are all.
        params: the parameters.
    """

    units: list[UpdateUnit]
    owned: list[list[int]]
    are_whole: list[bool]
    params: list[MainParam]
    given: list[TensorList] = field(default_factory=list)
    grads: TensorList | None = None


@dataclass
class Collected:
    """Local gradients of one step.

    Attributes:
        updates: per param group, what the update needs.
        params: those of which this rank has gradients, in the order of ``updates``.
        grads: their local gradients.
        weights: of each gradient's statistics.
        error: why this rank cannot step; the lists are empty then.
    """

    updates: list[PendingUpdate]
    params: list[MainParam]
    grads: TensorList
    weights: GradWeights
    error: Exception | None


class ReadyGrads:
    """Collects gradients; caches their statistics' weights while the same parameters have gradients."""

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
        self._weights: tuple[list[MainParam], GradWeights] | None = None
        self._units: Sequence[UpdateUnit] = ()
        self._weight_of: dict[MainParam, tuple[float, float]] = {}
        self._kept: WeakKeyDictionary[UpdateUnit, _MainGrads] = WeakKeyDictionary()
        self._measured: _Measured | None = None

    @property
    def weights(self) -> GradWeights | None:
        """Those of the newest step."""
        return None if self._weights is None else self._weights[1]

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
        updates: list[PendingUpdate] = []
        units = main_params.units()
        if units is not self._units:
            self._units = units
            self._weight_of.clear()
        for unit in units:
            found: Found | MegascaleError | None = None
            if self._grad_sync is not None:
                found = self._synced(unit)
            if found is None and not unit.has_dtensors:  # all param.grad at once, if kernels can read all there are
                if (grads := unit.grads.read()) is not None:
                    found = Found(unit, grads, unit)
                elif self._grad_sync is None and (some := unit.grads.read_some()) is not None:
                    found = self._some(unit, *some)
            if found is None:
                found = self._one_by_one(unit)
            if isinstance(found, MegascaleError):
                return self.failed(found)
            if found.unit.params:
                updates.append(PendingUpdate(param_groups[unit.group], *found))
        params, measured = self._to_measure(updates)
        return Collected(updates, params, measured, self._weigh(params), None)

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
        return Collected([], [], TensorList(), self._weigh([]), error)

    def _to_measure(self, updates: list[PendingUpdate]) -> tuple[list[MainParam], TensorList]:
        """Return the parameters of which this rank owns elements, and their gradients.

        The same objects while the same main grads are synced.
        """
        units = [update.unit for update in updates]
        known = self._measured
        if known is None or not are_same(known.units, units):
            owned = [
                [index for index, param in enumerate(unit.params) if param.shard is None or param.main.numel()]
                for unit in units
            ]
            params = [unit.params[index] for unit, own in zip(units, owned, strict=True) for index in own]
            wholes = [len(own) == len(unit.params) for unit, own in zip(units, owned, strict=True)]
            known = self._measured = _Measured(units, owned, wholes, params)
        given = [update.grads for update in updates]
        if known.grads is not None and are_same(known.given, given):
            return known.params, known.grads
        parts = []
        for grads, own, is_whole in zip(given, known.owned, known.are_whole, strict=True):
            parts.append(grads if is_whole else TensorList(grads[index] for index in own))
        joined = TensorList.joined(parts)
        if self._kept and are_same(given, [kept.grads for kept in map(self._kept.get, units) if kept is not None]):
            known.given, known.grads = given, joined  # main grads, which live as long as their GradSync
        return known.params, joined

    def _synced(self, unit: UpdateUnit) -> Found | MegascaleError | None:
        """Return the main grads of a unit, which are cached. None if a parameter has a gradient beside them."""
        kept = self._kept.get(unit)
        if kept is None or not kept.memory.holds():
            grads: list[Tensor] = []
            indices: list[int] = []
            for index, param in enumerate(unit.params):
                grad = self._main_grad(param)
                if grad is not None:
                    if not self._is_in_place(param, grad):
                        return _misplaced(param.name)
                    grads.append(grad)
                    indices.append(index)
            kept = self._kept[unit] = _MainGrads(TensorList(grads), indices, MemoryRecord(grads))
            self._measured = None
        if len(kept.grads) < len(unit.params):
            have_main_grad = set(kept.indices)
            for index, param in enumerate(unit.params):
                if index not in have_main_grad and param.model.grad is not None:
                    return None
        return self._some(unit, kept.indices, kept.grads)

    def _some(self, unit: UpdateUnit, indices: list[int], grads: TensorList) -> Found | MegascaleError:
        """Return the gradients that there are. An error for one that is missing because another GradSync has it."""
        if len(indices) == len(unit.params):
            return Found(unit, grads, unit)
        are_there = set(indices)
        for index, param in enumerate(unit.params):
            if index not in are_there and self._is_taken_elsewhere(param):
                return UsageError(f"the gradient of {param.name!r} was taken by a GradSync in backward; {REMEDY}")
        return Found(unit.part(indices), grads, unit, indices)

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

    def _one_by_one(self, unit: UpdateUnit) -> Found | MegascaleError:
        """Return the parameters that have a gradient or main grad. An error for one that no kernel can read."""
        indices: list[int] = []
        grads: list[Tensor] = []
        for index, param in enumerate(unit.params):
            grad, model = self._main_grad(param), param.model
            if grad is not None and not self._is_in_place(param, grad):
                return _misplaced(param.name)
            if grad is None and model.grad is not None:
                error = gradient_error(param.name, model.grad, model)
                if error is not None:
                    return error
                grad = to_local(model.grad)
            if grad is not None:
                indices.append(index)
                grads.append(grad)
        return self._some(unit, indices, TensorList(grads))

    def _is_taken_elsewhere(self, param: MainParam) -> bool:
        """Return whether a live GradSync, not the one that was given, takes the gradients of ``param``."""
        given: object = self._grad_sync
        return owner_of(param.model) not in (None, given)

    def _weigh(self, params: list[MainParam]) -> GradWeights:
        if self._weights is None or not are_same(self._weights[0], params):
            for param in params:
                if param not in self._weight_of:  # they serve while the units are the same
                    weight = self._holders.of(param.model)
                    compared = self._are_data_replicas_compared(param)
                    self._weight_of[param] = weight.share, weight.contrast if compared else weight.tensor_contrast
            pairs = [self._weight_of[param] for param in params]
            shares, contrasts = ([pair[at] for pair in pairs] for at in (0, 1))
            compares = any(contrasts) and not self._replicas_may_differ
            self._weights = (params, GradWeights(self._column(shares), self._column(contrasts) if compares else None))
        return self._weights[1]

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
