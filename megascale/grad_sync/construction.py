"""What ranks that reduce gradients together must build alike, in one form for every kind of object.

Each rank describes what it builds, all ranks of one reduction group exchange the descriptions, and each compares all of
them: so every rank raises the same error, where the first messages of a step would wait for one another.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from sys import intern

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megascale.errors import MOST_NAMES, ArgumentError
from megascale.parallel import UNSET, ParallelGroups, ranks_of
from megascale.utils.collectives import gather_or_raise, group_ranks, is_initialized
from megascale.utils.consensus import Facts, first_difference

ParamForm = tuple[str, str, tuple[int, ...], str]
"""Name, dtype, shape and where it is."""
Digest = tuple[str, tuple[int, ...], int, int]

_ABSENT = "absent"


@dataclass(frozen=True)
class Construction:
    """What one rank builds.

    Attributes:
        kind: the class that the user constructs.
        arguments: those that decide about messages, by name, as a message shows them.
        groups: the ranks of each field of ``groups``, in ascending order.
        parameters: lists of parameters whose order decides about messages, by what they are called in a message.
        values: digests of the parameters, by name; none where values may differ.
    """

    kind: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parameters: Mapping[str, Sequence[ParamForm]] = field(default_factory=dict)
    values: Mapping[str, Digest] = field(default_factory=dict)


_UNKNOWN = Construction("different call")
"""Stands for whatever else a rank exchanges at the same time."""


def param_forms(
    named_parameters: Iterable[tuple[str, nn.Parameter]], group_of: Mapping[str, int] | None = None
) -> list[ParamForm]:
    """Return what is compared of each parameter, besides its value. ``group_of``: its param group, compared too."""
    found = []
    for name, param in named_parameters:
        group, place = (group_of or {}).get(name), param.device.type
        place = place if group is None else f"{place}, param group {group}"
        found.append((name, intern(str(param.dtype)), tuple(param.shape), intern(place)))
    return found


def ranks_by_field(groups: ParallelGroups) -> dict[str, Sequence[int]]:
    """Return the ranks of each field of ``groups`` that was given; of None, this rank alone."""
    if not is_initialized():
        return {}
    given = {entry.name: getattr(groups, entry.name) for entry in fields(groups)}
    return {
        name: _compact(sorted(ranks_of(group)) or [dist.get_rank()])
        for name, group in given.items()
        if group is not UNSET
    }


def exchange(mine: Construction | None, error: Exception | None, group: ProcessGroup | None) -> list[Construction]:
    """Return what every rank of ``group`` builds, in the order of ranks. All of them call it together, once.

    Raises on every rank alike: the error of a rank that has one; ArgumentError if ranks build differently, naming the
    argument and the values of two ranks.
    """
    answers = gather_or_raise(mine, error, group)
    built = [answer if isinstance(answer, Construction) else _UNKNOWN for answer in answers]
    if group is not None:
        _require_alike(dict(zip(group_ranks(group), built, strict=True)))
    return built


def _require_alike(built: Mapping[int, Construction]) -> None:
    """Raise ArgumentError if ranks build differently. ``built``: by global rank."""
    first = next(iter(built))
    for rank, construction in built.items():
        # The facts of thousands of parameters are written down only where something differs.
        if _compared(construction) != _compared(built[first]):
            found = first_difference({first: _facts(built[first]), rank: _facts(construction)})
            if found is not None:
                raise _different(found.label, {first: found.first or _ABSENT, rank: found.other or _ABSENT})
    # No rank may be in a group of another one that it does not have itself.
    claimed = {(name, ranks): rank for rank, one in built.items() for name, ranks in one.groups.items()}
    for (name, ranks), rank in claimed.items():
        for member in ranks:
            theirs = built[member].groups.get(name, ranks) if member in built else ranks
            if theirs != ranks:
                values = {rank: _describe_ranks(ranks), member: _describe_ranks(theirs)}
                raise _different(f"groups.{name}", dict(sorted(values.items())))


def _compared(one: Construction) -> tuple[object, ...]:
    """Return what must be the same on all ranks; groups and values are compared in other ways."""
    return one.kind, one.arguments, one.parameters


def _facts(one: Construction) -> Facts:
    """Return :func:`_compared` as a message tells it, by what a message calls it."""
    forms = {
        f"parameter {index} of {listing}": f"{name!r} ({dtype}, shape {shape}, {place})"
        for listing, params in one.parameters.items()
        for index, (name, dtype, shape, place) in enumerate(params)
    }
    return {"the object that reduces gradients": f"a {one.kind}", **one.arguments, **forms}


def _different(what: str, values: Mapping[int, str]) -> ArgumentError:
    told = " and ".join(f"{value} on rank {rank}" for rank, value in values.items())
    return ArgumentError(
        f"{what} is {told}, but ranks that reduce gradients together exchange the same messages; build it alike on "
        "every rank: the same class and arguments, and the same parameters in the same order"
    )


def _describe_ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMES} more" if len(ranks) > MOST_NAMES else ""
    return f"ranks {list(ranks[:MOST_NAMES])}{more}"


def _compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return ascending ranks as a range where they are evenly spaced: it stays small with many ranks."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[-1] + 1, step)
    return spaced if list(spaced) == list(ranks) else tuple(ranks)
