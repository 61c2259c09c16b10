"""Checks of single values. Each returns the value in its canonical type, or raises an error that names it."""

import math
import os
from collections.abc import Collection
from pathlib import Path
from reprlib import repr as short  # a model would fill the screen
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.utils import spelling

# Bounds of a loss scale: inside them both the scale and its reciprocal are finite, non-zero fp32 numbers.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**127


def real(name: str, value: Any) -> float:
    """Return ``value`` as a finite float. Raises ArgumentTypeError (bool, non-number) or ArgumentError (NaN, inf)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number, got {short(value)} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise ArgumentError(
            f"{name} must be within the range of a float, got an integer of {len(str(abs(value)))} digits"
        ) from None
    if not math.isfinite(number):
        raise ArgumentError(f"{name} must be finite, got {value!r}")
    return number


def positive(name: str, value: Any, *, above: float = 0, below: float = math.inf) -> float:
    """Return ``value`` as a float above zero, or another bound of 0 or more, and below one."""
    number = real(name, value)
    if not above < number < below:
        bound = f"above {above}" if number <= above else f"below {below}"
        raise ArgumentError(f"{name} must be {bound}, got {value!r}")
    return number


def non_negative(name: str, value: Any) -> float:
    """Return ``value`` as a float at or above zero."""
    number = real(name, value)
    if number < 0:
        raise ArgumentError(f"{name} must be 0 or more, got {value!r}")
    return number


def fraction(name: str, value: Any) -> float:
    """Return ``value`` as a float in [0, 1)."""
    number = real(name, value)
    if not 0 <= number < 1:
        raise ArgumentError(f"{name} must be in [0, 1), got {value!r}")
    return number


def scale(name: str, value: Any) -> float:
    """Return ``value`` as a loss scale: positive, and both it and its reciprocal normal in fp32."""
    number = positive(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ArgumentError(
            f"{name} must be between 2**-126 and 2**127 so that fp32 holds it and its reciprocal, got {value!r}"
        )
    return number


def integer(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` as an int from ``minimum`` to ``maximum``. Bools and floats are refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an integer, got {short(value)} of type {type(value).__name__}")
    if value < minimum:
        raise ArgumentError(f"{name} must be {minimum} or more, got {value!r}")
    if maximum is not None and value > maximum:
        raise ArgumentError(f"{name} must be {maximum} or less, got {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False, got {short(value)} of type {type(value).__name__}")
    return value


def path(name: str, value: Any) -> Path:
    """Return ``value`` as an absolute path, which a later ``os.chdir()`` leaves alone."""
    if not isinstance(value, (str, os.PathLike)):
        raise ArgumentTypeError(f"{name} must be a path, got {short(value)} of type {type(value).__name__}")
    return Path(value).absolute()


def named(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return ``value`` as a list of pairs of a name and a parameter."""
    try:
        return [(key, param) for key, param in value]
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{name} must be pairs of name and parameter, as model.named_parameters() gives, got a "
            f"{type(value).__name__}"
        ) from error


def betas(name: str, value: Any) -> None:
    """Raise an error unless ``value`` is two numbers in [0, 1)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ArgumentError(f"{name} must be two numbers in [0, 1), got {value!r}")
    for index, beta in enumerate(value):
        fraction(f"{name}[{index}]", beta)


def one_of(name: str, value: Any, choices: Collection[str]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}{spelling.meant(value, choices)}"
        )
    return value


def process_group(name: str, value: Any) -> ProcessGroup | None:
    """Return ``value`` if it is a process group that this rank is in, or None."""
    if value is None or isinstance(value, ProcessGroup):
        return value
    if is_other_ranks_group(value):
        raise ArgumentError(
            f"{name} is a process group that this rank, {dist.get_rank()}, is not in (torch.distributed.new_group() "
            f"returned GroupMember.NON_GROUP_MEMBER, {value}); make a group for every rank and pass each its own, or "
            "build this on the group's ranks only"
        )
    raise ArgumentTypeError(
        f"{name} must be a ProcessGroup that this rank belongs to, or None, got {value!r}; of a DeviceMesh pass "
        "mesh.get_group()"
    )


def is_other_ranks_group(value: Any) -> bool:
    """Return whether ``value`` is what torch gives to ranks that a new group leaves out."""
    return isinstance(value, int) and value == dist.GroupMember.NON_GROUP_MEMBER
