"""The cases of a test that has many: some of them quick, the others of one day a week."""

from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import pytest


def turns(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that have each value once: axes that are shorter than the longest begin anew.

    For `cases`, of a test whose cases repeat one promise with other values: ``quick=lambda *case: case in chosen``.
    """
    longest = max(map(len, axes))
    return [tuple(axis[place % len(axis)] for axis in map(list, axes)) for place in range(longest)]


def cases(
    *axes: Collection[Any], quick: Callable[..., bool], rest: pytest.MarkDecorator = pytest.mark.weekly
) -> list[Any]:
    """Return every combination of ``axes`` for ``parametrize``; those that are not quick are ``rest``."""
    return [pytest.param(*one, marks=() if quick(*one) else rest) for one in product(*axes)]
