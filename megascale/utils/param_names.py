"""Names of parameters, compared without what wrappers such as torch.compile put into them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from megascale.errors import StateDictError, listed

COMPILED = "_orig_mod"
"""What torch.compile puts in front of the names of the module inside, and in their middle where a part is compiled."""
WRAPPERS = ("module", COMPILED)
"""DistributedDataParallel's, which a user's own attribute may be called as well, and torch.compile's.

Other wrappers of torch, such as that of activation checkpointing, leave their own out of names and state dicts.
"""


def bare(name: str) -> str:
    """Return ``name`` without the prefixes ``module.`` and ``_orig_mod.``, in any order and number.

    ``_orig_mod.`` is left out of the middle, too: no attribute of a user's has that name.
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        parts = parts[1:]
    return _without([COMPILED], ".".join(parts))


def renames(given: Iterable[str], live: Iterable[str], what: str) -> dict[str, str]:
    """Return the live name of each given name that differs from it by ``module.`` and ``_orig_mod.`` alone, anywhere.

    A name that both sides have is itself: a model may really have an attribute called ``module``.

    Args:
        given: saved names; live: those here.
        what: has the given names, such as "state dict"; for the message.

    Raises:
        StateDictError: two names of one side would be the same, and the other side has it. It names both.
    """
    there, here = dict.fromkeys(given), dict.fromkeys(live)
    theirs, ours = (_grouped(side, but=there.keys() & here.keys()) for side in (there, here))
    found: dict[str, str] = {}
    for name in (name for name in theirs if name in ours):
        saved, own = theirs[name], ours[name]
        if len(saved) > 1 or len(own) > 1:
            side, both = (what, saved) if len(saved) > 1 else ("what loads it", own)
            raise StateDictError(
                f"{side} has both {both[0]!r} and {both[1]!r}, and 'module.' and '_orig_mod.' are left out of names "
                f"that are compared, so either may be {(own if both is saved else saved)[0]!r}; load into a model that "
                "is wrapped as the saved one was, or rename the keys"
            )
        found[saved[0]] = own[0]
    return found


def by_position(given: Sequence[Sequence[str]], live: Sequence[Sequence[str]], what: str) -> dict[str, str]:
    """Return the live name of each given name where one side has names and the other positions: "0", "1", ...

    An optimizer that is built from ``parameters()`` has no names. Torch counts parameters in the order of the param
    groups, and so do these. Empty where both sides have names, or both positions.

    Args:
        given: saved names by param group; live: those here.
        what: has the given names, such as "state dict"; for the message.

    Raises:
        StateDictError: the numbers of parameters differ. It names the parameters.
    """
    there, here = [*chain(*given)], [*chain(*live)]
    if _are_positions(there) == _are_positions(here) or {*there} <= {*here} or {*here} <= {*there}:
        return {}
    if [*map(len, given)] != [*map(len, live)]:
        raise StateDictError(
            f"{what} has {_by_group(given)}, and what loads it {_by_group(live)}: one side has names and the other "
            "positions, which are matched in order. Build the optimizer over the same parameters in the same param "
            "groups"
        )
    return dict(zip(there, here, strict=True))


def _are_positions(names: Sequence[str]) -> bool:
    return all(name == str(position) for position, name in enumerate(names))


def _by_group(groups: Sequence[Sequence[str]]) -> str:
    return " and ".join(f"{len(names)} parameters ({listed(names)})" for names in groups) or "no parameters"


def _grouped(names: Iterable[str], but: Collection[str]) -> dict[str, list[str]]:
    """Return the names, except for ``but``, by what they are without the parts that wrappers put into them."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        if name not in but:
            groups[_without(WRAPPERS, name)].append(name)
    return groups


def _without(parts: Collection[str], name: str) -> str:
    """Return ``name`` without ``parts``, its last part aside: a parameter may be called so."""
    *modules, own = name.split(".")
    return ".".join([*(part for part in modules if part not in parts), own])
