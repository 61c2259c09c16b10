"""Checks of single values: what they return, to the bound, and what they refuse."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch.distributed as dist

from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.utils import validate

INTEGER = partial(validate.integer, minimum=2, maximum=5)
CHOICE = partial(validate.one_of, choices=("one", "two"))

TAKEN: list[tuple[Callable[[str, Any], Any], Any, Any]] = [
    (validate.real, -3, -3.0),
    (validate.positive, 1e-9, 1e-9),
    (validate.positive, 1, 1.0),
    (validate.non_negative, 0, 0.0),
    (validate.non_negative, 0.5, 0.5),
    (validate.fraction, 0, 0.0),
    (validate.fraction, 1 - 2**-53, 1 - 2**-53),
    (validate.scale, 2**127, 2.0**127),
    (validate.scale, 2.0**-126, 2.0**-126),
    (INTEGER, 2, 2),
    (INTEGER, 5, 5),
    (partial(validate.integer, minimum=2), 10**30, 10**30),
    (validate.flag, True, True),
    (validate.flag, False, False),
    (CHOICE, "two", "two"),
    (validate.process_group, None, None),
]

REFUSED: list[tuple[Callable[[str, Any], Any], Any, type[Exception], str]] = [
    (validate.real, True, ArgumentTypeError, "x must be a number, got True of type bool"),
    (validate.real, "1", ArgumentTypeError, "x must be a number, got '1' of type str"),
    (validate.real, -(10**400), ArgumentError, "x must be within the range of a float, got an integer of 401 digits"),
    (validate.real, math.nan, ArgumentError, "x must be finite, got nan"),
    (validate.positive, 0, ArgumentError, "x must be above 0, got 0"),
    (validate.positive, -math.inf, ArgumentError, "x must be finite, got -inf"),
    (validate.non_negative, -5e-324, ArgumentError, "x must be 0 or more, got -5e-324"),
    (validate.fraction, 1, ArgumentError, "x must be in [0, 1), got 1"),
    (validate.fraction, -5e-324, ArgumentError, "x must be in [0, 1), got -5e-324"),
    (validate.scale, 0, ArgumentError, "x must be above 0, got 0"),
    (validate.scale, math.nextafter(2.0**127, math.inf), ArgumentError, "x must be between 2**-126 and 2**127"),
    (validate.scale, math.nextafter(2.0**-126, 0.0), ArgumentError, "x must be between 2**-126 and 2**127"),
    (INTEGER, 1, ArgumentError, "x must be 2 or more, got 1"),
    (INTEGER, 6, ArgumentError, "x must be 5 or less, got 6"),
    (INTEGER, 3.0, ArgumentTypeError, "x must be an integer, got 3.0 of type float"),
    (partial(validate.integer, minimum=0), True, ArgumentTypeError, "x must be an integer, got True of type bool"),
    (validate.flag, 1, ArgumentTypeError, "x must be True or False, got 1 of type int"),
    (CHOICE, "three", ArgumentError, "x must be one of 'one', 'two', got 'three'"),
    (CHOICE, ["one"], ArgumentError, "x must be one of 'one', 'two', got ['one']"),
    (partial(validate.one_of, choices=cast("Any", [1])), 1, ArgumentError, "x must be one of 1, got 1"),
    (validate.process_group, "world", ArgumentTypeError, "x must be a ProcessGroup that this rank belongs to, or None"),
    (validate.process_group, 3, ArgumentTypeError, "x must be a ProcessGroup that this rank belongs to, or None"),
]


@pytest.mark.parametrize(("check", "given", "expected"), TAKEN)
def test_what_fits_is_returned_in_its_type(check: Callable[[str, Any], Any], given: Any, expected: Any) -> None:
    """Also at the very bound."""
    found = check("x", given)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("check", "given", "error", "message"), REFUSED)
def test_what_does_not_fit_is_named(
    check: Callable[[str, Any], Any], given: Any, error: type[Exception], message: str
) -> None:
    """Also right beyond the bound."""
    with pytest.raises(error) as caught:
        check("x", given)
    assert type(caught.value) is error
    assert str(caught.value).startswith(message)


def test_only_torchs_mark_is_a_group_of_other_ranks() -> None:
    """What ``new_group`` returns to ranks that it leaves out."""
    assert validate.is_other_ranks_group(dist.GroupMember.NON_GROUP_MEMBER)
    assert not any(map(validate.is_other_ranks_group, (None, 0, -99, "world")))
