"""Hooks that hand a parameter's gradient to its one owner as soon as backward has made it.

torch keeps such a hook in C++, where Python's garbage collector sees no reference cycle. So the hook refers to its
owner weakly, and an unused owner is freed with its main grads and thread.
"""

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megascale.errors import ArgumentError, ArgumentTypeError, sparse_gradient
from megascale.utils.calls import outside_of_graphs
from megascale.utils.dtensors import is_dtensor

if TYPE_CHECKING:
    from megascale.grad_sync.sync import GradSync


class GradHook:
    """Hands one parameter's gradient to its owner, a weak reference."""

    __slots__ = ("_bucket_index", "_name", "owner")

    def __init__(self, owner: "GradSync", name: str, bucket_index: int) -> None:
        self.owner = ref(owner)
        self._name = name
        self._bucket_index = bucket_index

    @outside_of_graphs  # in a compiled training step backward runs, and calls its hooks, as compiled code
    def __call__(self, param: nn.Parameter) -> None:
        """Called by torch after it has accumulated a gradient."""
        owner = self.owner()
        if owner is not None:
            owner.take_grad(param, self._name, self._bucket_index)


def owner_of(param: torch.Tensor) -> "GradSync | None":
    """Return the owner of the gradients of ``param``; None: they stay in ``param.grad``."""
    hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    owners = (hook.owner() for hook in hooks.values() if isinstance(hook, GradHook))
    return next((owner for owner in owners if owner is not None), None)


def remove(hooks: Iterable[RemovableHandle]) -> None:
    """Remove hooks from parameters. A finalizer: it refers to nobody who may be gone."""
    for hook in hooks:
        hook.remove()


def require_unowned(named_parameters: Iterable[tuple[str, torch.Tensor]], remedy: str) -> None:
    """Raise ArgumentError, naming it, for a parameter whose gradients have an owner already.

    An unused owner that only a reference cycle keeps is collected here.
    """
    owned = [(name, param) for name, param in named_parameters if owner_of(param) is not None]
    if owned:
        gc.collect()
    for name, param in owned:
        kind = getattr(owner_of(param), "owner_kind", None)  # not the owner, which the traceback would keep alive
        if kind is not None:
            raise ArgumentError(
                f"parameter {name!r} belongs to a live {kind}, which takes its gradients in backward; {remedy}"
            )


def check_syncable(params: Mapping[str, nn.Parameter]) -> None:
    """Raise an error, naming it, for a parameter whose gradient nobody can take in backward and reduce."""
    name_of: dict[int, str] = {}
    for name, param in params.items():
        if is_dtensor(param):
            raise ArgumentTypeError(
                f"parameter {name!r} is a DTensor, whose own mesh reduces its gradient; use MixedPrecisionOptimizer "
                "without grad_sync"
            )
        if id(param) in name_of:
            raise ArgumentError(
                f"parameters {name_of[id(param)]!r} and {name!r} are the same tensor, whose gradient would count "
                "twice; name it once, as module.named_parameters() does"
            )
        name_of[id(param)] = name
        if param.grad is not None and param.grad.layout != torch.strided:
            raise sparse_gradient(name, param.grad.layout)
    require_unowned(
        params.items(),
        "delete that and all that refers to it, or call its detach() (DistributedOptimizer: grad_sync.detach())",
    )
