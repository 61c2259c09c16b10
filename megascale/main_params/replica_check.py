"""Finds parameters that differ between ranks that should hold the same, and broadcasts or refuses them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale.errors import ArgumentError, listed
from megascale.parallel import ParallelGroups, is_expert
from megascale.utils.collectives import all_gather_object, broadcast_, group_size

BROADCAST = "pass broadcast_params=True to take the first rank's"


def find_differing(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    groups: ParallelGroups | ProcessGroup | DeviceMesh | None = None,
) -> list[str]:
    """Return the names of parameters that are not the same, bit for bit, on all ranks that hold them.

    All ranks call it together and get the same answer. Costs one pass over the parameters and one small exchange.
    Parameters on the meta device have no values to compare.
    """
    resolved = ParallelGroups.of(groups)
    named = [(name, param) for name, param in named_parameters if not param.is_meta]
    names: dict[str, None] = {}
    for experts in _kinds(named):
        holders = next(resolved.of_param(param).holders for _, param in named if is_expert(param) == experts)
        if group_size(holders) == 1:
            continue
        mine = digests({name: param for name, param in named if is_expert(param) == experts})
        theirs = all_gather_object(mine, holders)
        known = dict.fromkeys(name for digests in theirs for name in digests)
        names |= dict.fromkeys(
            name for name in known if any(digests.get(name) != theirs[0].get(name) for digests in theirs)
        )
    return list(names)


@torch.no_grad()
def broadcast_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]], groups: ParallelGroups) -> None:
    """Overwrite every parameter by its value on the first rank that holds it. All ranks call it together."""
    for _, param in named_parameters:
        holders = groups.of_param(param).holders
        if param.is_contiguous():
            broadcast_(param.data, holders)
        else:
            param.copy_(broadcast_(param.detach().contiguous(), holders))


def require_same(
    named_parameters: Iterable[tuple[str, nn.Parameter]], groups: ParallelGroups, remedy: str = BROADCAST
) -> None:
    """Raise ArgumentError on every rank if a parameter is not the same on all ranks that hold it, naming it."""
    differing = find_differing(named_parameters, groups)
    if differing:
        raise ArgumentError(
            f"parameters differ between data-parallel ranks: {listed(differing)}; seed every rank alike or load the "
            f"same weights, or {remedy}"
        )


def _kinds(named: list[tuple[str, nn.Parameter]]) -> list[bool]:
    return sorted({is_expert(param) for _, param in named})


def digests(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return, by name, a digest that is equal where two ranks hold the same bits: dtype, shape, two sums modulo 2**64.

    One pass over the tensors. The host waits once for each device that they are on.
    """
    sums: dict[str, list[int]] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        here = [name for name, tensor in tensors.items() if tensor.device == device]
        sums |= dict(zip(here, torch.stack([_sums(tensors[name]) for name in here]).tolist(), strict=True))
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), sums[name][0] % 2**64, sums[name][1] % 2**64)
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def _sums(param: Tensor, chunk: int = 1 << 22) -> Tensor:
    """Return two sums over the bits of a tensor, plain and weighted by position, modulo 2**64: int64, shape [2]."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]
    flat = param.detach().contiguous().view(-1).view(bits)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk].long()
        slots = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        sums += torch.stack([part.sum(), (part * slots).sum()])
    return sums
