"""LocalGrads: this rank's part of an optimizer's gradients, to be measured and unscaled in place."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megascale.grad_sync.usable_grads import memory_error
from megascale.kernels import Backend, GradReader, TensorStats, is_plain, plain, stats_dtype
from megascale.utils.collectives import redistribute_like
from megascale.utils.dtensors import is_dtensor, to_local
from megascale.utils.transfer import to_device_async

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BackendOf = Callable[[torch.device], Backend]


class Location(NamedTuple):
    """Location of gradients. ``mesh``: of DTensors; ``holders``: how many of its ranks hold each element."""

    device: torch.device
    mesh: "DeviceMesh | None" = None
    holders: int = 1


class LocalGrads:
    """The gradients of an optimizer, by location and dtype: dense local tensors that alias ``param.grad``.

    A Partial DTensor gradient is first replaced by the reduced one, an fp16 sparse one by the coalesced one, as
    duplicates may add up to inf. Of a sparse gradient the values count.

    A gradient whose bytes are not its values (torch's negative bit) is replaced by a copy.

    Args:
        optimizer: whose gradients.
        coalesced: for a norm: sparse gradients are coalesced, and their values may be copies.

    Raises GradientError as :func:`check_memory` does.
    """

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer, *, coalesced: bool = False) -> None:
        self._grads: defaultdict[Location, defaultdict[torch.dtype, list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )
        check_memory(optimizer)
        plain: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = param.grad
                if type(grad) is Tensor and grad.layout is torch.strided:  # the usual case, fast
                    plain[grad.device, grad.dtype].append(grad)
                elif grad is not None:
                    location, values = _located(param, grad, coalesced)
                    self._grads[location][values.dtype].append(values)
        for (device, dtype), grads in plain.items():
            self._grads[Location(device)][dtype] += grads

    def measure(self, backend_of: BackendOf) -> dict[Location, TensorStats]:
        """Return the statistics of the gradients at each location, in one pass that writes none, without a sync."""
        return {
            location: backend_of(location.device).measure(
                [grad for grads in by_dtype.values() for grad in grads], False
            )
            for location, by_dtype in self._grads.items()
        }

    def unscale_(self, inv_scale: Tensor, backend_of: BackendOf) -> dict[torch.device, Tensor]:
        """Multiply all gradients by ``inv_scale`` in place. Returns by device whether any was not finite.

        fp16 gradients are checked again afterwards: a scale below 1 may have pushed them out of range.
        """
        found_infs: dict[torch.device, Tensor] = {}
        for location, by_dtype in self._grads.items():
            found_inf = found_infs.setdefault(location.device, torch.zeros((), device=location.device))
            factor = to_device_async(inv_scale, location.device)
            for dtype, grads in by_dtype.items():
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
                if dtype == torch.float16:
                    found_inf.copy_(
                        torch.maximum(found_inf, found_in(backend_of(location.device).measure(grads, False)))
                    )
        return found_infs


def check_memory(optimizer: torch.optim.Optimizer) -> None:
    """Check the memory of all dense gradients before any is read or written.

    One whose bytes are not its values (torch's negative bit) is replaced by a copy. Raises GradientError
    for one that has lost its memory, or that is of another shape than its parameter.
    """
    params: list[Tensor] = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if type(param.grad) is Tensor and param.grad.layout is torch.strided
    ]
    if GradReader(params).read() is not None:
        return
    for index, param in enumerate(params):
        error = None if param.grad is None else memory_error(f"parameter {index} with a gradient", param.grad, param)
        if error is not None:
            raise error
    for param in params:
        if param.grad is not None and not is_plain(param.grad):
            param.grad = plain(param.grad)


def found_in(stats: TensorStats) -> Tensor:
    """Return whether any gradient has a non-finite element: fp32, 0-d, 0 or 1."""
    return (stats.non_finite.sum() > 0).float()


def squares_in(location: Location, stats: TensorStats) -> Tensor:
    """Return this rank's share of the sum of squares at ``location``: 0-d, of :func:`stats_dtype`."""
    return stats.sum_squares.sum().to(stats_dtype(location.device)) / location.holders


def _located(param: Tensor, grad: Tensor, coalesced: bool) -> tuple[Location, Tensor]:
    """Return the location of a parameter's gradient, and the gradient, local and dense."""
    if is_dtensor(param) and is_dtensor(grad):
        if grad.placements != param.placements:
            param.grad = grad = redistribute_like(grad, param)
        mesh, values = grad.device_mesh, to_local(grad)
        holders = math.prod(mesh.size(dim) for dim, placed in enumerate(grad.placements) if placed.is_replicate())
        return Location(values.device, mesh, holders), values
    if grad.is_sparse:
        if grad.dtype == torch.float16:
            param.grad = grad = grad.coalesce()
        grad = (grad.coalesce() if coalesced else grad)._values()
    return Location(grad.device), grad
