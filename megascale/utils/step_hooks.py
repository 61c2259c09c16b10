"""Step hooks of torch's optimizers, without the span that torch opens for a profiler in every step."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from torch.optim import Optimizer, optimizer

from megascale.utils.profiling import is_profiling

P = ParamSpec("P")
R = TypeVar("R")


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

    torch opens the span without a profiler too, which costs the host more than two launches.
    """
    decorated = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        is_seen = is_profiling() or has_step_hooks(cast("Optimizer", args[0]))
        return decorated(*args, **kwargs) if is_seen else step(*args, **kwargs)

    wrapped.hooked = True  # type: ignore[attr-defined]  # tells torch that it is decorated
    return wrapped
