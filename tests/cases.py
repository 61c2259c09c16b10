"""The cases of a test that has many: some of them quick, the others of one day a week."""

from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import pytest


def cases(
    *axes: Collection[Any], quick: Callable[..., bool], rest: pytest.MarkDecorator = pytest.mark.weekly
) -> list[Any]:
    """Return every combination of ``axes`` for ``parametrize``; those that are not quick are ``rest``."""
    return [pytest.param(*one, marks=() if quick(*one) else rest) for one in product(*axes)]
