"""Whether two lists hold the same objects: what was derived from one list of tensors then holds for the other."""

from collections.abc import Sequence
from operator import is_
from typing import Any


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two lists hold the same objects, in the same order."""
    return one is other or (len(one) == len(other) and all(map(is_, one, other)))
