"""What ranks that reduce gradients together must build alike, in one form for every kind of object.

Each rank describes what it builds, all ranks of one reduction group exchange digests of the descriptions, and where
these differ the descriptions: so every rank raises the same error, where the first messages of a step would wait for
one another.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megascale.errors import ArgumentError
from megascale.parallel import UNSET, ParallelGroups, ranks_of
from megascale.utils.collectives import gather_or_raise, group_ranks, is_initialized
from megascale.utils.consensus import Facts, digest, explained

KIND = "the object that reduces gradients"
"""The label of the class that the user constructs."""


class Construction(NamedTuple):
    """What one rank builds.

    Attributes:
        facts: the class, arguments that decide about messages, and each parameter in lists whose order does.
        groups: the ranks of each field of ``groups``, in ascending order.
        values: digests of the parameters, by name; none where values may differ.
    """

    facts: Facts
    groups: Mapping[str, Sequence[int]]
    values: Facts


def param_forms(
    listing: str, named_parameters: Iterable[tuple[str, nn.Parameter]], group_of: Mapping[str, int] | None = None
) -> Facts:
    """Return what is compared of each parameter of a list, besides its value.

    ``listing``: what a message calls the list. ``group_of``: the param group of each parameter, compared too.
    """
    found = {}
    for index, (name, param) in enumerate(named_parameters):
        group = (group_of or {}).get(name)
        place = param.device.type if group is None else f"{param.device.type}, param group {group}"
        place += "" if param.requires_grad else ", frozen"
        found[f"parameter {index} of {listing}"] = f"{name!r} ({param.dtype}, shape {tuple(param.shape)}, {place})"
    return found


def ranks_by_field(groups: ParallelGroups) -> dict[str, Sequence[int]]:
    """Return the ranks of each field of ``groups`` that was given; of None, this rank alone."""
    if not is_initialized():
        return {}
    return {
        name: _compact(sorted(ranks_of(group)) or [dist.get_rank()])
        for name, group in vars(groups).items()
        if group is not UNSET
    }


def exchange(mine: Construction | None, error: Exception | None, group: ProcessGroup | None) -> list[Construction]:
    """Return what every rank of ``group`` builds, in the order of ranks. All of them call it together, once.

    Where all build the same, facts and values of the others are digests.

    Raises on every rank alike: the error of a rank that has one; ArgumentError if ranks build differently, naming the
    argument and the values of two ranks.
    """
    short = mine
    if mine is not None:
        short = mine._replace(
            facts={KIND: mine.facts[KIND], "digest": digest(mine.facts)}, values={"digest": digest(mine.values)}
        )
    answers: list[Any] = gather_or_raise(short, error, group)
    # A rank may make another call that exchanges. It is not asked again.
    built = [
        own if isinstance(own, Construction) else Construction({KIND: "a different call"}, {}, {}) for own in answers
    ]
    if built == answers and any((own.facts, own.values) != (built[0].facts, built[0].values) for own in built):
        built = [own for own in gather_or_raise(mine, None, group) if own is not None]
    if group is not None:
        require_alike(dict(zip(group_ranks(group), built, strict=True)))
    return built


def require_alike(built: Mapping[int, Construction]) -> None:
    """Raise ArgumentError if ranks build differently. ``built``: by global rank."""
    found = explained({rank: own.facts for rank, own in built.items()})
    # No rank may be in a group of another one that it does not have itself.
    claimed = {(name, ranks): rank for rank, own in built.items() for name, ranks in own.groups.items()}
    for (name, ranks), rank in claimed.items():
        for other in ranks:
            theirs = built[other].groups.get(name, ranks) if other in built else ranks
            found = found or explained({rank: {f"groups.{name}": ranks}, other: {f"groups.{name}": theirs}})
    if found is not None:
        raise ArgumentError(
            f"{found}, but ranks that reduce gradients together exchange the same messages; build it alike on every "
            "rank: the same class and arguments, and the same parameters in the same order"
        )


def _compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return ascending ranks as a range where they are evenly spaced: it stays small with many ranks."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[-1] + 1, step)
    return spaced if list(spaced) == list(ranks) else tuple(ranks)
