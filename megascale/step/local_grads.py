"""Finishes gradient reduction and collects a step's local gradients, from ``param.grad`` and main grads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError, GradientError, UsageError
from megascale.grad_sync.grad_hook import owner_of, require_unowned
from megascale.grad_sync.reduced_grads import ReducedGrads
from megascale.grad_sync.usable_grads import gradient_error
from megascale.kernels import Forms, GradWeights, ListReader, TensorList, tensor_fault
from megascale.main_params.base import MainParams
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.parallel import ParallelGroups
from megascale.step.grad_stats import Holders
from megascale.step.update import PendingUpdate
from megascale.utils.collectives import redistribute_like
from megascale.utils.dtensors import all_held, is_dtensor, to_local
from megascale.utils.identity import are_same
from megascale.utils.transfer import to_device_async

REMEDY = "give that GradSync to this optimizer (grad_sync=...), or drop it, or call its detach()"

ReplicaSet = tuple[str, tuple[int, ...], str]
"""What ranks are called that hold the same gradient, which they are, and the parameter's name."""

_GRAD = attrgetter("grad")


@dataclass
class _Listed:
    """The parameters of all units in one list, and what is known of their gradients from the steps before.

    Attributes:
        units: in the order of the list.
        slices: of the list, one per unit.
        params: the main params, whose gradients are measured.
        models: the parameters.
        mains: their main grads; None where ``param.grad`` is the gradient.
        weights: of the statistics of their gradients.
        likes: forms of what this rank has of the parameters; a gradient has its shape and its device.
        specs: what says of each parameter that is a DTensor how it is placed; empty where none is.
        fitting: forms of gradients that were found to fit.
        reader: of the gradients.
    """

    units: Sequence[UpdateUnit]
    slices: list[slice]
    params: list[MainParam]
    models: list[Any]
    mains: list[Tensor | None]
    weights: GradWeights
    likes: Forms
    specs: list[Any]
    fitting: Forms | None = None
    reader: ListReader = field(default_factory=ListReader)


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
    """Collects gradients: those of all units are read as one list."""

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
        self._listed: _Listed | None = None

    def validate_param(self, param: MainParam) -> None:
        """Raise ArgumentError for a parameter whose gradient goes elsewhere or that ``grad_stats`` cannot agree on."""
        if self._is_taken_elsewhere(param):
            require_unowned([(param.name, param.model)], REMEDY)
        try:
            self._holders.of(param.model)
        except ArgumentError as error:
            raise ArgumentError(f"parameter {param.name!r}: {error}") from None

    def collect(
        self, param_groups: Sequence[dict[str, Any]], main_params: MainParams, error: Exception | None
    ) -> Collected:
        """Return the gradients there are, once reductions are finished. Parameters without a gradient take no part.

        A Partial DTensor gradient is replaced by the reduced one; also on a rank with an ``error``, which cannot step,
        as others wait for it.

        Raises GradientError for a gradient that no kernel can read, UsageError for one that another GradSync has.
        """
        units = main_params.units()
        if error is not None:
            for param in chain.from_iterable(unit.params for unit in units):
                _reduced(param.model, param.model.grad)
            return self.failed(error)
        if self._listed is None or units is not self._listed.units:
            self._listed = self._list(units)
        listed = self._listed
        grads = self._read(listed)
        pairs = zip(units, grads.cut(listed.slices), strict=True)
        updates = [
            PendingUpdate(list(map(param_groups.__getitem__, unit.groups)), unit, part)
            for unit, part in pairs
            if part.num_there or unit.counted
        ]
        return Collected(updates, listed.params if grads.num_there else [], grads, listed.weights, None)

    def grad_of(self, param: MainParam) -> Tensor | None:
        """Return what this rank has of a gradient, as it is: the main grad, or the local part of ``param.grad``."""
        grad = self._main_grad(param)
        if grad is None:
            grad = param.model.grad
        return None if grad is None else to_local(grad)

    def failed(self, error: Exception) -> Collected:
        """Return an empty collection with ``error``, for a rank whose step cannot be taken."""
        return Collected([], [], TensorList(), self._weigh([]), error)

    def _list(self, units: Sequence[UpdateUnit]) -> _Listed:
        params = [param for unit in units for param in unit.params]
        ends = accumulate((len(unit.params) for unit in units), initial=0)
        models = [param.model for param in params]
        has_dtensors = any(map(is_dtensor, models))
        return _Listed(
            units=units,
            slices=[slice(begin, end) for begin, end in pairwise(ends)],
            params=params,
            models=models,
            mains=list(map(self._main_grad, params)),
            weights=self._weigh(params),
            likes=Forms([param.part for param in params]),
            specs=[model._spec if is_dtensor(model) else None for model in models] if has_dtensors else [],
        )

    def _read(self, listed: _Listed) -> TensorList:
        """Return the gradients of all parameters."""
        with torch._C.DisableTorchFunctionSubclass():  # DTensors would be asked for each, which takes twice as long
            grads: list[Any] = list(map(_GRAD, listed.models))
        fit = not listed.specs or _place(listed.models, grads, listed.specs)
        if self._grad_sync is not None:
            grads = [grad if main is None else main for grad, main in zip(grads, listed.mains, strict=True)]
        parts = filled = all_held(grads) if listed.specs else grads  # what is odd beside plain ones is read one by one
        if type(None) in set(map(type, parts)):  # the parameter stands in: a gradient usually has its form
            pairs = zip(parts, listed.params, strict=True)
            filled = [param.part if part is None else part for part, param in pairs]
        found = listed.reader.read(parts, filled)
        if found is not None and found.forms is not listed.fitting:  # as in the first step, and seldom again
            if found.forms.fit(listed.likes) and all(dtype.is_floating_point for dtype in found.forms.kinds):
                listed.fitting = found.forms
            else:
                fit = False
        if found is None or not fit:
            found = self._one_by_one(listed)
        for index in found.missing:
            if self._is_taken_elsewhere(param := listed.params[index]):
                raise UsageError(f"the gradient of {param.name!r} was taken by a GradSync in backward; {REMEDY}")
        return found

    def _one_by_one(self, listed: _Listed) -> TensorList:
        """Return gradients that cannot be read as one list."""
        grads: list[Tensor | None] = []
        for param, main in zip(listed.params, listed.mains, strict=True):
            grad = param.model.grad
            if main is not None:
                if tensor_fault(main) or main.shape != param.part.shape or not main.dtype.is_floating_point:
                    raise GradientError(
                        f"the main grad of {param.name!r} was given another shape, dtype or memory; write into the "
                        "tensor in place"
                    )
            elif grad is not None:
                error = gradient_error(param.name, grad, param.model)
                if error is not None:
                    raise error
                main = to_local(grad)
            grads.append(main)
        pairs = zip(grads, listed.params, strict=True)
        return TensorList(grads, filled=[param.part if grad is None else grad for grad, param in pairs])

    def _main_grad(self, param: MainParam) -> Tensor | None:
        """Return the main grad. A parameter that was frozen since takes no part."""
        if self._grad_sync is None or not param.model.requires_grad:
            return None
        return self._grad_sync.local_grad(param.model)

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
        return to_device_async(torch.tensor(values, dtype=torch.float64, device="cpu"), self._device)


def _place(models: list[Any], grads: list[Any], specs: list[Any]) -> bool:
    """Reduce Partial gradients in ``grads``. Return whether all that are DTensors have the shapes of their parameters.

    ``specs``: what says of each parameter that is a DTensor how it is placed; FSDP2's gradients have the same object.
    """
    fit = True
    now = [getattr(grad, "_spec", spec) for grad, spec in zip(grads, specs, strict=True)]
    for index, (spec, wanted) in enumerate([] if are_same(now, specs) else zip(now, specs, strict=True)):
        if spec is wanted:
            continue
        if wanted is not None and spec.placements != wanted.placements:
            grads[index] = _reduced(models[index], grads[index])
        fit = fit and wanted is not None and spec.shape == wanted.shape
    return fit


def _reduced(model: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return a gradient; a DTensor with the placements of its parameter, as which it is put there."""
    if is_dtensor(grad) and is_dtensor(model) and grad.placements != model.placements:
        model.grad = grad = redistribute_like(grad, model)
    return grad
