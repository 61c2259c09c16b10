"""Tells what a name was meant to be."""

import functools
import inspect
from collections.abc import Callable, Collection
from difflib import SequenceMatcher
from typing import ParamSpec, TypeVar

from megascale.errors import ArgumentTypeError

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


def nearest(name: str, known: Collection[str]) -> str:
    """Return which of the known names looks most like ``name``. The order of its words does not matter."""
    return max(known, key=lambda other: max(_likeness(name, other), _likeness(_sorted(name), _sorted(other))))


def names_arguments(cls: C) -> C:
    """Decorate a class so that an unknown keyword argument of its constructor is an error that names the nearest one.

    Python's own says only that it is unexpected.
    """
    setattr(cls, "__init__", names_arguments_of(vars(cls)["__init__"], cls.__name__))  # noqa: B010  # mypy's wish
    return cls


def names_arguments_of(function: Callable[P, R], called: str) -> Callable[P, R]:
    """Return a function that raises ArgumentTypeError for keyword arguments that it has not. ``called``: its name."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise ArgumentTypeError(f"{called} has no argument {name!r}; did you mean {nearest(name, known)!r}?")
        return function(*args, **kwargs)

    return checked


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _sorted(name: str) -> str:
    return "_".join(sorted(name.split("_")))
