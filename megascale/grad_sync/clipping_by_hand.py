"""Refuses torch's own clipping of gradients that lie in main grads: it would pass over them, and return a norm of 0.

``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` skip each parameter whose ``grad`` is None, and leave no
trace that a step could see. So while a GradSync is there, torch's two functions look first. A program may have imported
them by name before: what is replaced is the function that torch's own wrapper around each of them calls.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.grad_sync.grad_hook import owner_of

if TYPE_CHECKING:
    from megascale.grad_sync.sync import GradSync

_CLIPPERS = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)
_there: "WeakSet[GradSync]" = WeakSet()


def refuse_while_there(sync: "GradSync") -> None:
    """Let torch's clipping raise UsageError for parameters whose gradients lie in main grads, while ``sync`` lives."""
    if not list(_there):
        _replace(_looking_first)
    _there.add(sync)
    finalize(sync, _end)


def _end() -> None:
    """Give torch its functions back once no GradSync is there."""
    if not list(_there):  # a set may count one that is just ending
        _replace(lambda function: getattr(function, "__wrapped__", function))


def _replace(change: Callable[[Any], Any]) -> None:
    for clipper in _CLIPPERS:
        # torch decorates each one, with no_grad; a torch that no longer does has nothing to replace here.
        for name, cell in zip(clipper.__code__.co_freevars, clipper.__closure__ or (), strict=True):
            if name == "func":
                cell.cell_contents = change(cell.cell_contents)


def _looking_first(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def looking_first(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners = [owner_of(param) for param in params if param.grad is None]
        kinds = {owner.owner_kind for owner in owners if owner is not None}
        if kinds and len(owners) == len(params):
            raise UsageError(
                f"torch.nn.utils.{clip.__name__}() finds no gradient to clip: those of its parameters lie in the main "
                f"grads of {' and '.join(sorted(kinds))}, and param.grad is None. Nothing was clipped: pass clip_grad= "
                "to the optimizer's constructor, or call optimizer.clip_grad_norm_()"
            )
        return clip(params, *args, **kwargs)

    return looking_first
