"""The cases of a test that has many: some of them quick, the others of one day a week."""

from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import pytest


def cases(*axes: Collection[Any], quick: Callable[..., bool]) -> list[Any]:
    """Return every combination of ``axes`` for ``parametrize``; that which is not ``quick(*combination)`` is weekly."""
    return [pytest.param(*one, marks=() if quick(*one) else pytest.mark.weekly) for one in product(*axes)]
