"""LocalGrads: this rank's part of an optimizer's gradients, to be measured and unscaled in place."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megascale.grad_sync.usable_grads import memory_error
from megascale.kernels import UNREADABLE, Backend, Forms, ListReader, TensorList, TensorStats
from megascale.utils.collectives import redistribute_like
from megascale.utils.dtensors import is_dtensor, to_local
from megascale.utils.transfer import to_device_async

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BackendOf = Callable[[torch.device], Backend]

_Key = tuple[torch.device, torch.dtype]
"""Which plain gradients: their device and dtype."""

_GRAD = attrgetter("grad")

_readers: WeakKeyDictionary[torch.optim.Optimizer, dict[Hashable, ListReader]] = WeakKeyDictionary()
"""Keep the forms of an optimizer's tensors from call to call, as a step of the core keeps those of gradients, and no
tensor: the optimizer is its user's, who may drop its gradients and state, or move them, at any time."""


class Location(NamedTuple):
    """Location of gradients. ``mesh``: of DTensors; ``holders``: how many of its ranks hold each element."""

    device: torch.device
    mesh: "DeviceMesh | None" = None
    holders: int = 1


class PlainGrads(NamedTuple):
    """Plain gradients of one device and dtype, and their parameters: of all param groups, or of one.

    ``params``: None where kernels cannot read all of them.
    """

    params: TensorList | None
    grads: TensorList


class LocalGrads:
    """The gradients of an optimizer, by location and dtype: dense local tensors that alias ``param.grad``.

    A Partial DTensor gradient is first replaced by the reduced one, an fp16 sparse one by the coalesced one, as
    duplicates may add up to inf. Of a sparse gradient the values count.

    Args:
        optimizer: whose gradients.
        coalesced: for a norm: sparse gradients are coalesced, and their values may be copies.

    Raises GradientError for a gradient that has lost its memory, or that is of another shape than its parameter, before
    any is read or written.

    Attributes:
        are_aliases: whether all alias ``param.grad``; else some may be copies.
    """

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer, *, coalesced: bool = False) -> None:
        self._parts: defaultdict[Location, defaultdict[torch.dtype, list[Sequence[Tensor]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._plain: dict[tuple[int, *_Key], PlainGrads] = {}
        self.are_aliases = True
        plain, others = _by_kind(optimizer)
        read = {key: _read(optimizer, key, groups) for key, groups in plain.items()}
        if None in read.values():
            _require_memory(optimizer)
        for param, grad in others:
            self.are_aliases &= not (coalesced and grad.is_sparse)
            location, values = _located(param, grad, coalesced)
            self._parts[location][values.dtype].append([values])
        for key, groups in plain.items():
            device, dtype = key
            found = read[key]
            slices = [slice(begin, end) for begin, end in pairwise(accumulate(map(len, groups.values()), initial=0))]
            if found is None:
                self._parts[Location(device)][dtype].append(list(map(_GRAD, chain.from_iterable(groups.values()))))
                continue
            self._parts[Location(device)][dtype].append(found.grads)
            params = [None for _ in slices] if found.params is None else found.params.cut(slices)
            for group, ours, grads in zip(groups, params, found.grads.cut(slices), strict=True):
                self._plain[group, device, dtype] = PlainGrads(ours, grads)

    def plain_of(self, group: int, device: torch.device, dtype: torch.dtype) -> PlainGrads | None:
        """Return the plain gradients of the param group at an index; None if kernels cannot read each of them."""
        return self._plain.get((group, device, dtype))

    def measure(self, backend_of: BackendOf) -> dict[Location, TensorStats]:
        """Return the statistics of the gradients at each location, in one pass that writes none, without a sync."""
        return {
            location: backend_of(location.device).measure(
                _joined([part for parts in by_dtype.values() for part in parts]), False
            )
            for location, by_dtype in self._parts.items()
        }

    def unscale_(self, inv_scale: Tensor, backend_of: BackendOf) -> dict[torch.device, Tensor]:
        """Multiply all gradients by ``inv_scale`` in place. Returns by device whether any was not finite.

        fp16 gradients are checked again afterwards: a scale below 1 may have pushed them out of range.
        """
        found_infs: dict[torch.device, Tensor] = {}
        for location, by_dtype in self._parts.items():
            found_inf = found_infs.setdefault(location.device, torch.zeros((), device=location.device))
            factor = to_device_async(inv_scale, location.device)
            for dtype, parts in by_dtype.items():
                grads = _joined(parts)
                torch._amp_foreach_non_finite_check_and_unscale_([*grads], found_inf, factor)
                if dtype == torch.float16:
                    found_inf.copy_(
                        torch.maximum(found_inf, found_in(backend_of(location.device).measure(grads, False)))
                    )
        return found_infs


def _by_kind(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[_Key, dict[int, list[Tensor]]], list[tuple[Tensor, Tensor]]]:
    """Return the parameters with a plain gradient, by the index of their group, and others that have one, with it."""
    plain: defaultdict[_Key, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    others: list[tuple[Tensor, Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            grad = param.grad
            if type(grad) is Tensor and grad.layout is torch.strided:  # the usual case, fast
                plain[grad.device, grad.dtype][index].append(param)
            elif grad is not None:
                others.append((param, grad))
    return plain, others


def _read(optimizer: torch.optim.Optimizer, key: _Key, groups: Mapping[int, list[Tensor]]) -> PlainGrads | None:
    """Return the plain gradients of some parameters, if kernels can read each and it fits its parameter. Else None."""
    params = list(chain.from_iterable(groups.values()))
    grads = reader_of(optimizer, ("grads", *key)).read(list(map(_GRAD, params)))
    if grads is None or not key[1].is_floating_point:
        return None
    known = reader_of(optimizer, ("params", *key)).read(params)
    try:
        forms = Forms(params) if known is None else known.forms  # a wrapper's gradient may be plain
    except UNREADABLE:
        return None
    return PlainGrads(known, grads) if grads.forms.fit(forms) else None


def _require_memory(optimizer: torch.optim.Optimizer) -> None:
    """Check the memory of all plain gradients, one by one.

    Raises GradientError for one that no kernel can read, or that is of another shape than its parameter.
    """
    params = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if type(param.grad) is Tensor and param.grad.layout is torch.strided
    ]
    for index, param in enumerate(params):
        error = memory_error(f"parameter {index} with a gradient", param.grad, param)
        if error is not None:
            raise error


def _joined(parts: list[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return one list of several."""
    return parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))


def found_in(stats: TensorStats) -> Tensor:
    """Return whether any gradient has a non-finite element: fp32, 0-d, 0 or 1."""
    return (stats.non_finite.sum() > 0).float()


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


def reader_of(optimizer: torch.optim.Optimizer, key: Hashable) -> ListReader:
    """Return the reader of a list of tensors of ``optimizer``, the same one in every call.

    ``key``: of the list among those of the optimizer.
    """
    return _readers.setdefault(optimizer, defaultdict(ListReader))[key]
