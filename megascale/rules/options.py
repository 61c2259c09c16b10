"""Reads the options of param groups, and names those that are missing or of a wrong type."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError
from megascale.utils import validate
from megascale.utils.portable import plain


def require_options(options: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ArgumentError, naming them, if a param group lacks options."""
    lacks = [name for name in names if name not in options]
    if lacks:
        raise ArgumentError(
            f"a param group lacks {', '.join(map(repr, lacks))}; set them, or add the group by add_param_group(), "
            "which fills in the defaults"
        )


def number(options: Mapping[str, Any], name: str) -> float:
    """Return an option that is a finite number. Raises ArgumentError or ArgumentTypeError, naming it, for another."""
    return validate.real(f"{name} of a param group", plain(options[name]))


def pair(options: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Return an option that is two finite numbers. Raises as :func:`number` does."""
    value = options[name]
    if not isinstance(value, Collection) or isinstance(value, str) or len(value) != 2:
        raise ArgumentError(f"{name} of a param group must be two numbers, got {value!r}")
    first, second = (validate.real(f"{name} of a param group", plain(one)) for one in value)
    return first, second


def values_of(name: str, index: int | None = None) -> Callable[[torch.optim.Optimizer], list[Any]]:
    """Return a function that lists the values of an option in an optimizer's defaults and param groups."""

    def values(optimizer: torch.optim.Optimizer) -> list[Any]:
        found = [options[name] for options in (optimizer.defaults, *optimizer.param_groups) if name in options]
        chosen = found if index is None else [value[index] for value in found]
        return [float(value) if isinstance(value, Tensor) else value for value in chosen]

    return values
