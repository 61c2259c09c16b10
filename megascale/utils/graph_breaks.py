"""Keeps an optimizer's own work out of the graphs of torch.compile.

A program that compiles its training step has a graph break there, and the values of a step that is not compiled. A
step calls native kernels by address, counts on the host and talks to other ranks; none of it can be traced.
"""

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

from megascale.utils.supported_torch import explaining

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")


def outside_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that compiled code calls it in Python, with all that it calls in turn.

    It is how torch's own ``Optimizer.zero_grad`` is decorated. ``torch.compiler.disable()`` would import the compiler,
    which takes a second, with megascale; this imports it at the first call, and every torch optimizer has by then.
    """
    return torch._compile._disable_dynamo(function)


def methods_outside_of_graphs(cls: C) -> C:
    """Decorate all public methods of a class with :func:`outside_of_graphs`; not those that it inherits.

    Their errors, and the constructor's, of a name that torch lacks are UnsupportedTorchError.
    """
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(cls, name, outside_of_graphs(explaining(method)))
        elif name == "__init__":
            setattr(cls, name, explaining(method))
    return cls
