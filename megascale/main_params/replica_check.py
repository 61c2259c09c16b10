"""Finds parameters that differ between ranks that should hold the same, and broadcasts or refuses them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from megascale.errors import ArgumentError, MegascaleError, listed
from megascale.grad_sync.construction import KIND, Construction, exchange, param_forms
from megascale.grad_sync.grad_hook import owner_of
from megascale.grad_sync.sync import GradSync
from megascale.parallel import ParallelGroups, is_expert
from megascale.utils.collectives import broadcast_, group_size, meet
from megascale.utils.consensus import differing

_UNREDUCED = "a MixedPrecisionOptimizer"
"""What a rank builds whose gradients no GradSync reduces."""


@torch.no_grad()
def broadcast_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]], groups: ParallelGroups) -> None:
    """Overwrite every parameter by its value on the first rank that holds it. All ranks call it together."""
    for _, param in named_parameters:
        param.copy_(broadcast_(param.detach().contiguous(), groups.of_param(param).holders))


def require_same(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    groups: ParallelGroups,
    group_of: Mapping[str, int],
    *,
    values_may_differ: bool = False,
    are_added: bool = False,
) -> None:
    """Compare the GradSync of these parameters, their param groups and values, on all ranks that hold them.

    All ranks call it together. One small exchange for each kind of parameters, dense and experts; for values a pass
    over the parameters. Parameters on the meta device are left out.

    Args:
        named_parameters: in the optimizer's order.
        groups: the optimizer's.
        group_of: the param group of each parameter, by name.
        values_may_differ: leave out the values and the param groups.
        are_added: to an optimizer that is there.

    Raises:
        ArgumentError: on every rank alike, naming it, if ranks have built different GradSyncs or optimizers; their
            GradSyncs are then detached from their parameters, unless ``are_added``. Also if a parameter is not the same
            on all ranks.
        UsageError: with ``are_added``, if other ranks do not come.
    """
    named = {name: param for name, param in named_parameters if not param.is_meta}
    syncs: dict[int, GradSync] = {}

    def built(experts: bool, own: Mapping[str, nn.Parameter]) -> Construction:
        here = [owner for owner in map(owner_of, own.values()) if isinstance(owner, GradSync)]
        syncs.update((id(sync), sync) for sync in here)
        by_sync = here[0].construction(experts=experts) if here else Construction({KIND: _UNREDUCED}, {}, {})
        facts = {
            KIND: by_sync.facts[KIND],
            "replicas_may_differ": values_may_differ,
            **param_forms("the optimizer", own.items(), {} if values_may_differ else group_of),
            **by_sync.facts,
        }
        return Construction(facts, by_sync.groups, {} if values_may_differ else digests(own))

    try:
        exchanged = list(exchanges(named, groups, built, are_added=are_added))
    except MegascaleError:
        for sync in () if are_added else syncs.values():  # an optimizer that is there goes on without what was added
            sync.detach()
        raise
    for every in exchanged:
        require_same_values(every)


def exchanges(
    params: Mapping[str, nn.Parameter],
    groups: ParallelGroups,
    build: Callable[[bool, Mapping[str, nn.Parameter]], Construction],
    error: Exception | None = None,
    *,
    are_added: bool,
) -> Iterator[list[Construction]]:
    """Yield what every rank that holds the same parameters builds of them: of dense ones, and of experts.

    One exchange for each kind, as not all ranks need have both.

    Args:
        params: by name.
        build: returns what this rank builds of its parameters of one kind, whether of experts.
        error: what this rank has found already.
        are_added: to an optimizer that is there, which one rank may do alone.

    Raises ArgumentError on every rank alike if ranks build differently; else the first error of a rank; UsageError if
    other ranks do not come.
    """
    holders = {is_expert(param): groups.of_param(param).holders for param in params.values()}
    for experts in sorted(holders):
        mine: Construction | None = None
        try:
            if error is None and group_size(holders[experts]) > 1:
                own = {name: param for name, param in params.items() if is_expert(param) == experts}
                mine = build(experts, own)
        except Exception as caught:  # whatever it is: other ranks wait
            error = caught
        if are_added:
            meet(holders[experts], "add_param_group(), or the first step after parameters were unfrozen,")
        yield exchange(mine, error, holders[experts])


def require_same_values(built: Sequence[Construction]) -> None:
    """Raise ArgumentError if a parameter has not the same value on all ranks, naming it. ``built``: by every rank."""
    names = differing({rank: construction.values for rank, construction in enumerate(built)})
    if names:
        raise ArgumentError(
            f"parameters differ between data-parallel ranks: {listed(names)}; seed every rank alike or load the same "
            "weights, or pass broadcast_params=True to a DistributedOptimizer to take the first rank's. If these "
            "replicas are different models on purpose, pass replicas_may_differ=True to a MixedPrecisionOptimizer"
        )


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
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[param.element_size()]
    flat = param.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(bits)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk].long()
        slots = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        sums += torch.stack([part.sum(), (part * slots).sum()])
    return sums
