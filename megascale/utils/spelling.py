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
_ELSEWHERE = {
    "max_norm": "clip_grad",
    "max_grad_norm": "clip_grad",
    "gradient_clipping": "clip_grad",
    "gradient_clip_val": "clip_grad",
    "loss_scaler": "grad_scaler",
    "distributed": "zero1",
    "zero": "zero1",
    "replicated": "ddp",
    "fsdp": "fsdp2",
    "zero3": "fsdp2",
}
"""What torch, Transformers, DeepSpeed, Lightning and Megatron call an argument of ours, or a value of one."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ALIKE = 0.6
"""From this share of equal letters on a name was probably meant, as of difflib.get_close_matches."""


def nearest(name: str, known: Collection[str]) -> str:
    """Return which of the known names looks most like ``name``, whatever its words' order, its letters' case.

    A name that another library has for one of them looks most like that one.
    """
    if _ELSEWHERE.get(name) in known:
        return _ELSEWHERE[name]
    return max(known, key=lambda other: max(_likeness(name, other), _likeness(_sorted(name), _sorted(other))))


def meant(name: object, known: Collection[str]) -> str:
    """Return ``; did you mean 'window'?`` if a known name looks like ``name``, else nothing."""
    if not isinstance(name, str) or not known:
        return ""
    best = nearest(name, known)
    is_alike = best == _ELSEWHERE.get(name) or _likeness(name, best) >= _ALIKE
    return f"; did you mean {best!r}?" if is_alike else ""


def names_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function as :func:`names_arguments` does a class."""
    return names_arguments_of(function, f"{function.__name__}()")


def names_arguments(cls: C) -> C:
    """Decorate a class so that an unknown keyword argument of its constructor is an error that names the nearest one,
    and a missing argument one that says where it is explained.

    Python's own say only that they are unexpected, or missing.
    """
    setattr(cls, "__init__", names_arguments_of(vars(cls)["__init__"], cls.__name__))  # noqa: B010  # mypy's wish
    return cls


def names_arguments_of(function: Callable[P, R], called: str) -> Callable[P, R]:
    """Return a function that raises ArgumentTypeError for keyword arguments that it has not, and for missing arguments.

    ``called``: its name.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    ordered = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = [name for name, one in parameters.items() if one.default is one.empty and one.kind in _NAMED]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise ArgumentTypeError(f"{called} has no argument {name!r}; did you mean {nearest(name, known)!r}?")
        for name in required:
            if name not in kwargs and name not in ordered[: len(args)]:
                about = called.removesuffix("()")
                raise ArgumentTypeError(f"{called} needs the argument {name!r}: pass {name}=...; see help({about})")
        return function(*args, **kwargs)

    return checked


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _sorted(name: str) -> str:
    return "_".join(sorted(name.split("_")))
