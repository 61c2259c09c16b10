"""From ``param.grad`` to local gradients that can be measured: the end of gradient reduction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megascale.collectives import redistribute_like
from megascale.errors import ArgumentError, GradientError, sparse_gradient
from megascale.grad_stats import Holders
from megascale.grad_sync import GradSync
from megascale.inner_update import GroupUpdate
from megascale.kernels import stats_dtype
from megascale.main_params import MainParam, MainParams, local
from megascale.parallel import ParallelGroups


@dataclass(frozen=True)
class Collected:
    """Local gradients of one step.

    Attributes:
        updates: per param group, what the update needs.
        grads: all local gradients, in the order of ``updates``, on one device for measuring.
        weights: shape [len(grads)], what each gradient's sums count.
        error: what makes a gradient of this rank unusable; the lists are empty then.
    """

    updates: list[GroupUpdate]
    grads: list[Tensor]
    weights: Tensor
    error: GradientError | None


class ReadyGrads:
    """Collects gradients and remembers, as long as the same parameters have them, what their sums count."""

    def __init__(
        self,
        groups: ParallelGroups,
        device: torch.device,
        grad_sync: GradSync | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        self._grad_sync = grad_sync
        self._holders = Holders(groups, sharded=sharded)
        self._device = device
        self._weights: tuple[tuple[int, ...], Tensor] | None = None

    def admit(self, param: MainParam) -> None:
        """Raise ArgumentError, naming it, for a parameter on whose gradient ``grad_stats`` could not agree."""
        try:
            self._holders.weight(param.model)
        except ArgumentError as error:
            raise ArgumentError(f"parameter {param.name!r}: {error}") from None

    def collect(self, param_groups: Sequence[dict[str, Any]], main_params: MainParams) -> Collected:
        """Finish reductions and return the gradients there are. Parameters without a gradient take no part."""
        if self._grad_sync is not None:
            self._grad_sync.finish()
        active = [
            (param_groups[index], [param for param in params if self._has_grad(param)])
            for index, params in main_params.batches()
        ]
        error = _unusable(param for _, params in active for param in params)
        if error is not None:
            return Collected([], [], self._weigh([]), error)
        updates = [
            GroupUpdate(options, params, [self._finished(param, main_params) for param in params])
            for options, params in active
            if params
        ]
        # What this rank owns nothing of has nothing to measure.
        measured = [
            (param, grad)
            for update in updates
            for param, grad in zip(update.params, update.grads, strict=True)
            if param.shard is None or grad.numel()
        ]
        return Collected(updates, [grad for _, grad in measured], self._weigh([param for param, _ in measured]), None)

    def _main_grad(self, param: MainParam) -> Tensor | None:
        """Return the synced gradient. A parameter that was frozen since takes no part."""
        if self._grad_sync is None or not param.model.requires_grad:
            return None
        return self._grad_sync.main_grad(param.model)

    def _has_grad(self, param: MainParam) -> bool:
        return param.model.grad is not None or self._main_grad(param) is not None

    def _finished(self, param: MainParam, main_params: MainParams) -> Tensor:
        """Return the local gradient, a Partial one reduced first. The parameter then holds the reduced one."""
        piece = main_params.grad(param)
        if piece is not None:
            return piece
        main_grad, model = self._main_grad(param), param.model
        if main_grad is not None:
            return main_grad
        grad = model.grad
        if isinstance(grad, DTensor) and isinstance(model, DTensor) and grad.placements != model.placements:
            model.grad = grad = redistribute_like(grad, model)
        return local(grad)  # type: ignore[arg-type]

    def _weigh(self, params: list[MainParam]) -> Tensor:
        key = tuple(id(param) for param in params)
        if self._weights is None or self._weights[0] != key:
            weights = [self._holders.weight(param.model) for param in params]
            self._weights = (key, torch.tensor(weights, dtype=stats_dtype(self._device), device=self._device))
        return self._weights[1]


def _unusable(params: Iterable[MainParam]) -> GradientError | None:
    for param in params:
        grad = param.model.grad
        if grad is not None and grad.layout != torch.strided:
            return sparse_gradient(param.name, grad.layout)
    return None
