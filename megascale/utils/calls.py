"""How calls of ours look to torch: to torch.compile, its profiler and its step hooks; and errors of a torch too old.

A program that compiles its training step has a graph break at each public method of an optimizer, and the values of a
step that is not compiled. A step calls native kernels by address, counts on the host and talks to other ranks; none of
it can be traced.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer, optimizer

from megascale.utils.supported_torch import explained

C = TypeVar("C", bound=type)
P = ParamSpec("P")
R = TypeVar("R")

span: Callable[[str], AbstractContextManager[Any]] = torch._C._profiler._RecordFunctionFast
"""Returns a context that a profiler sees by its name; without a profiler it costs almost nothing."""


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
            explains = hasattr(method, "hooked")  # a step does so by itself
            setattr(cls, name, outside_of_graphs(method if explains else _explaining(method)))
        elif name == "__init__":
            setattr(cls, name, _explaining(method))
    return cls


def _explaining(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ImportError, AttributeError) as error:
            raise explained(error)  # noqa: B904  # it has its cause

    return wrapped


def has_step_hooks(one: Optimizer) -> bool:
    """Return whether the optimizer's ``step()`` calls hooks: its own, or those of all optimizers."""
    return bool(
        one._optimizer_step_pre_hooks
        or one._optimizer_step_post_hooks
        or optimizer._global_optimizer_pre_hooks
        or optimizer._global_optimizer_post_hooks
    )


def with_step_hooks(step: Callable[P, R]) -> Callable[P, R]:
    """Decorate an optimizer's ``step()`` as torch does, with hooks and a profiler's span, where there are any.

    torch opens the span without a profiler too, which costs the host more than two launches. Errors are explained as
    those of other methods.
    """
    decorated = Optimizer.profile_hook_step(step)

    @wraps(step)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if _profiler_enabled() or has_step_hooks(cast("Optimizer", args[0])):
                return decorated(*args, **kwargs)
            return step(*args, **kwargs)
        except (ImportError, AttributeError) as error:
            raise explained(error)  # noqa: B904  # it has its cause

    wrapped.hooked = True  # type: ignore[attr-defined]  # tells torch that it is decorated
    return wrapped
