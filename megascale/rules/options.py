"""Reads the options of param groups, and names those that are missing or of a wrong type."""

import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError


def require_options(options: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ArgumentError, naming them, if a param group lacks options."""
    lacks = [name for name in names if name not in options]
    if lacks:
        raise ArgumentError(
            f"a param group lacks {', '.join(map(repr, lacks))}; set them, or add the group by add_param_group(), "
            "which fills in the defaults"
        )


def number(options: Mapping[str, Any], name: str) -> float:
    """Return an option that is a finite number. Raises ArgumentError, naming it, for what is none."""
    value = options[name]
    if isinstance(value, numbers.Real):
        return _finite(name, value)
    raise ArgumentError(f"{name} of a param group must be a number, got {value!r} of type {type(value).__name__}")


def _finite(name: str, value: Any) -> float:
    try:
        result = float(value)
    except OverflowError:  # an integer that is too large
        result = math.inf
    if math.isfinite(result):
        return result
    raise ArgumentError(f"{name} of a param group must be finite, got {result}")


def pair(options: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Return an option that is two finite numbers. Raises ArgumentError, naming it, for what is none."""
    value = options[name]
    if isinstance(value, Collection) and len(value) == 2 and all(isinstance(one, numbers.Real) for one in value):
        first, second = value
        return _finite(name, first), _finite(name, second)
    raise ArgumentError(f"{name} of a param group must be two numbers, got {value!r}")


def values_of(name: str, index: int | None = None) -> Callable[[torch.optim.Optimizer], list[Any]]:
    """Return a function that lists the values of an option in an optimizer's defaults and param groups."""

    def values(optimizer: torch.optim.Optimizer) -> list[Any]:
        found = [options[name] for options in (optimizer.defaults, *optimizer.param_groups) if name in options]
        chosen = found if index is None else [value[index] for value in found]
        return [float(value) if isinstance(value, Tensor) else value for value in chosen]

    return values
