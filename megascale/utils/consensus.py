"""Do ranks that must do alike do so? Facts by label, one digest that a step's sum compares, one explanation.

A *fact* is a label and a plain value, "lr of param group 0" and 0.1, and ranks that must do alike have the same facts:
of what they build, of each step, of a checkpoint. There are two ways to find out whether they have:

- They exchange their facts, and each compares all of them: :func:`explained` and :func:`differing`. Every rank then
  names the same difference. That is one more collective, so it is for rare moments: a construction, a checkpoint, a
  step that has been refused already.
- They vote: each rank adds :func:`zero_sum` of its facts' digest to what is summed over ranks anyway. The sum is 0
  where the facts are the same. It says that something differs, not what.

Values that are equal must have the same ``repr``: digests and comparisons are made of it.
"""

from collections.abc import Mapping
from hashlib import blake2b
from itertools import chain
from typing import Any

from megascale.errors import MOST_NAMES

Facts = Mapping[str, Any]
"""Values by their labels, in the order in which a difference is told."""

_MISSING = "nothing"


def differing(facts: Mapping[int, Facts]) -> list[str]:
    """Return the labels whose values are not the same on all ranks, in the order of the facts. ``facts``: by rank."""
    every = list(facts.values())
    if all(own == every[0] for own in every):
        return []
    labels = dict.fromkeys(chain.from_iterable(every))
    return [label for label in labels if len({repr(own.get(label, _MISSING)) for own in every}) > 1]


def explained(facts: Mapping[int, Facts]) -> str | None:
    """Return the first difference with the values of two ranks, and the labels of others; None if there is none.

    ``facts``: by rank.
    """
    labels = differing(facts)
    if not labels:
        return None
    values = {rank: own.get(labels[0], _MISSING) for rank, own in facts.items()}
    first = next(iter(values))
    other = next(rank for rank, value in values.items() if repr(value) != repr(values[first]))
    told = " and ".join(
        f"{values[rank] if isinstance(values[rank], str) else repr(values[rank])} on rank {rank}"
        for rank in (first, other)
    )
    rest = len(labels) - 1 - MOST_NAMES
    more = ", ".join(labels[1 : MOST_NAMES + 1]) + (f" and {rest} more" if rest > 0 else "")
    return f"{labels[0]} is {told}" + (f" (different too: {more})" if more else "")


def digest(facts: Facts) -> bytes:
    """Return 8 bytes that are the same for the same facts, in any order."""
    return blake2b(repr(sorted(facts.items())).encode(), digest_size=8).digest()


def zero_sum(subject: bytes, num_ranks: int, rank: int, limit: int) -> int:
    """Return this rank's vote: those of ``num_ranks`` ranks add up to 0 if all vote on the same ``subject``.

    If not, their sum is 0 in one case of ``limit``, whichever ranks vote on something else, and however many. The
    numbers of any of them add up to less than ``num_ranks * limit``.

    Args:
        subject: what is voted on.
        num_ranks: that vote on it.
        rank: this one's index among them.
        limit: 1 or more.
    """
    drawn = int.from_bytes(blake2b(subject, digest_size=8).digest(), "little") % limit
    # The first rank adds what it draws from the subject as often as there are others, and each of these subtracts it.
    return drawn * (num_ranks - 1) if rank == 0 else -drawn
