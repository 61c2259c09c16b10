"""Consensus: do ranks that must do alike do so? Facts by name, one number that votes on them, one comparison.

A *fact* is a label and a value, "lr of param group 0" and 0.1, and ranks that must do alike have the same facts. There
are two ways to find out:

- They exchange their facts, and each compares all of them: :func:`gathered_facts` and :func:`differences`. Every rank
  then names the same difference. That is one more collective, so it is for rare moments: a construction, a checkpoint,
  a step that has been refused already.
- They vote: each rank adds :func:`zero_sum`, one number, to what is summed over ranks anyway. The sum is 0 where the
  facts are the same. It says that something differs, not what.

Values that are equal must have the same ``repr``: digests are made of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from megascale.utils.collectives import gather_or_raise, group_ranks

Facts = Mapping[str, Any]
"""Values by their labels."""


class Difference(NamedTuple):
    """A fact of one rank that is another one on the first rank; a value is None where a rank does not have the fact."""

    label: str
    first_rank: int
    first: Any
    rank: int
    other: Any

    def __str__(self) -> str:
        return f"{self.label} is {self.first!r} on rank {self.first_rank} and {self.other!r} on rank {self.rank}"


def differences(facts: Mapping[int, Facts]) -> Iterator[Difference]:
    """Yield what differs from the first rank's facts, rank by rank, in the order of the facts. ``facts``: by rank."""
    first_rank = next(iter(facts), 0)
    for rank, theirs in facts.items():
        first = facts[first_rank]
        if first == theirs:
            continue
        for label in dict.fromkeys((*first, *theirs)):
            if repr(first.get(label)) != repr(theirs.get(label)):
                yield Difference(label, first_rank, first.get(label), rank, theirs.get(label))


def first_difference(facts: Mapping[int, Facts]) -> Difference | None:
    """Return the first of :func:`differences`; None if all ranks have the same facts."""
    return next(differences(facts), None)


def first_other_rank(facts: Sequence[Facts]) -> tuple[int, list[str]] | None:
    """Return the first rank whose facts are not the first's, and which; None if there is none. ``facts``: by rank."""
    found = list(differences(dict(enumerate(facts))))
    return (found[0].rank, sorted(one.label for one in found if one.rank == found[0].rank)) if found else None


def gathered_facts(facts: Any, error: Exception | None, group: ProcessGroup | None) -> dict[int, Any]:
    """Return the facts of all ranks of ``group``, by global rank, in its order. All of them call it together.

    Raises on every rank alike if one has an ``error``.
    """
    return dict(zip(group_ranks(group) or (0,), gather_or_raise(facts, error, group), strict=True))


def digest(facts: Facts) -> bytes:
    """Return 8 bytes that are the same for the same facts, in any order."""
    return blake2b(repr(sorted(facts.items())).encode(), digest_size=8).digest()


def zero_sum(subject: bytes, num_ranks: int, rank: int, limit: int) -> int:
    """Return this rank's vote, above ``-limit`` and below ``limit``: those of ``num_ranks`` ranks add up to 0.

    They do so if all vote on the same ``subject``. If not, their sum is 0 in one case of ``limit``, whichever ranks
    vote on something else, and however many.

    Args:
        subject: what is voted on.
        num_ranks: that vote on it.
        rank: this one's index among them.
        limit: 1 or more.
    """
    # Ranks stand in a circle. Between two neighbours lies a number that both draw from the subject: one of them adds
    # it, the other subtracts it.
    here, there = (
        int.from_bytes(blake2b(b"%d " % (place % num_ranks) + subject, digest_size=8).digest(), "little") % limit
        for place in (rank, rank + 1)
    )
    return here - there
