"""Lends main params, with unscaled gradients, to the wrapped optimizer in place of model params.

Whatever an optimizer computes while it holds them, in its ``step()`` or in another method, it computes in fp32, and the
state that it makes is fp32. This is the one way in which code of a wrapped optimizer sees main params.

An optimizer may hold others of the same parameters, as Lookahead and SAM do. They are lent the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import dtensor_like, held, to_local
from megascale.utils.nests import tensors_in


def holders_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizer, under "", and those of the same parameters that it holds, under their attributes' paths."""
    found = {"": optimizer}
    seen = {id(optimizer)}
    params: set[int] = set()

    def search(prefix: str, attributes: Mapping[Any, Any]) -> None:
        for name, value in attributes.items():
            is_kind = isinstance(value, (torch.optim.Optimizer, list, tuple, dict))
            if not is_kind or name in ("param_groups", "state", "defaults") or id(value) in seen:
                continue
            seen.add(id(value))  # a list may hold itself
            path = f"{prefix}{name}"
            if not isinstance(value, torch.optim.Optimizer):
                search(f"{path}.", value if isinstance(value, dict) else dict(enumerate(value)))
                continue
            if not params:
                params.update(_param_ids(optimizer))
            if not params.isdisjoint(_param_ids(value)):
                found[path] = value
                search(f"{path}.", vars(value))

    search("", vars(optimizer))
    return found


def put_back(
    holder: torch.optim.Optimizer,
    attributes: Mapping[str, Any],
    state: Mapping[Any, Any],
    groups: Sequence[tuple[dict[str, Any], Mapping[str, Any]]],
) -> None:
    """Give an optimizer its attributes, its state and its groups, each with its options, in the same dicts again."""
    vars(holder).update(attributes)
    holder.state.clear()
    holder.state.update(state)
    holder.param_groups[:] = [group for group, _ in groups]
    for group, options in groups:
        params = group["params"]
        group.clear()
        group.update({"params": params, **options})


def _param_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def is_narrow(value: Any, param: MainParam) -> bool:
    """Return whether an entry of a parameter's state holds a tensor of the parameter's 16-bit dtype."""
    if isinstance(value, Tensor):
        return value.dtype == param.form.dtype
    return any(one.dtype == param.form.dtype for one in tensors_in(value))


@contextmanager
def _replaceable_grad(param: Tensor) -> Iterator[None]:
    """Let a gradient of the parameter's own dtype replace ``param.grad`` inside the context, and put it back after."""
    grad, dtype = param.grad, param.grad_dtype
    is_odd = grad is not None and grad.dtype != param.dtype
    if is_odd:
        param.grad_dtype = None
    try:
        yield
    finally:
        param.grad = None
        if is_odd and grad is not None and grad.dtype == dtype:
            param.grad_dtype = dtype
        param.grad = grad


@contextmanager
def lent(
    holders: Mapping[str, torch.optim.Optimizer], params: Sequence[MainParam], grads: Sequence[Tensor | None]
) -> Iterator[None]:
    """Show optimizers main params in place of model params inside the context; restore all of it after.

    They see these parameters alone: others may still have a gradient, by which they would be updated.

    Args:
        holders: the wrapped optimizer and those that it holds, as :func:`holders_of` returns them.
        params: owned by this rank, and decoded.
        grads: of each the local gradient, unscaled, in the main param's dtype; None: it has none.

    Raises UsageError if param groups were added or removed inside; they are then as before.
    """
    main_of = {id(param.model): param.main for param in params}
    copies = [param for param in params if param.main is not param.model]
    optimizers = list(holders.values())
    groups_before = [list(holder.param_groups) for holder in optimizers]
    params_before = [[group["params"] for group in groups] for groups in groups_before]
    memory = [to_local(param.main) for param in params]
    set_aside = ExitStack()
    try:
        for param, grad in zip(params, grads, strict=True):
            if param.main is param.model:
                set_aside.enter_context(_replaceable_grad(param.model))
            param.main.grad = None if grad is None else dtensor_like(grad, param.main)
        # State is keyed by parameter: it moves to the key under which the optimizer looks for it.
        for holder in optimizers:
            for param in copies:
                if param.model in holder.state:
                    holder.state[param.main] = holder.state.pop(param.model)
        for groups, listed in zip(groups_before, params_before, strict=True):
            for group, models in zip(groups, listed, strict=True):
                group["params"] = [main_of[id(model)] for model in models if id(model) in main_of]
        yield
    finally:
        for param in params:
            param.main.grad = None
        set_aside.close()
        changed = False
        for holder, groups, listed in zip(optimizers, groups_before, params_before, strict=True):
            if len(holder.param_groups) != len(groups):
                changed, holder.param_groups[:] = True, groups
            for group, models in zip(holder.param_groups, listed, strict=True):
                group["params"] = models
            for param in copies:  # its step may have replaced its state
                if param.main in holder.state:
                    holder.state[param.model] = holder.state.pop(param.main)
        for param, before in zip(params, memory, strict=True):
            # `p.data = old`, as some optimizers write it, is a copy: main params stay where they are.
            if (now := to_local(param.main)).data_ptr() != before.data_ptr():
                held(param.main).data = before.copy_(now)
    if changed:
        raise UsageError(
            f"{type(optimizers[0]).__name__} added or removed param groups while it held main params; add them by the "
            "wrapper's add_param_group()"
        )
