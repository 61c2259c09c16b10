"""Runs functions, and holds tensors, without autograd."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run under ``torch.no_grad()``, which is entered only if autograd is on.

    A step is under it already; to enter and leave it once more costs the host as much as an operator.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapped


def detached(tensor: Tensor) -> Tensor:
    """Return the live tensor without autograd's part: itself where it has none."""
    return tensor.detach() if tensor.requires_grad else tensor
