"""Lends main params, with unscaled gradients, to the wrapped optimizer in place of model params.

Whatever an optimizer computes while it holds them, in its ``step()`` or in another method, it computes in fp32, and the
state that it makes is fp32. This is the one way in which code of a wrapped optimizer sees main params.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megascale.errors import UsageError
from megascale.main_params.main_param import MainParam
from megascale.utils.dtensors import dtensor_like, held, to_local
from megascale.utils.nests import tensors_in


def put_back(
    optimizer: torch.optim.Optimizer,
    state: Mapping[Any, Any],
    groups: Sequence[tuple[dict[str, Any], Mapping[str, Any]]],
) -> None:
    """Give an optimizer its state and its groups, each with its options, in the same dicts again."""
    optimizer.state.clear()
    optimizer.state.update(state)
    optimizer.param_groups[:] = [group for group, _ in groups]
    for group, options in groups:
        params = group["params"]
        group.clear()
        group.update({"params": params, **options})


def is_narrow(value: Any, param: MainParam) -> bool:
    """Return whether an entry of a parameter's state holds a tensor of the parameter's 16-bit dtype."""
    if isinstance(value, Tensor):
        return value.dtype == param.form.dtype
    return any(one.dtype == param.form.dtype for one in tensors_in(value))


@contextmanager
def lent(
    optimizer: torch.optim.Optimizer, params: Sequence[MainParam], grads: Sequence[Tensor | None]
) -> Iterator[None]:
    """Show an optimizer main params in place of model params inside the context; restore all of it after.

    It sees these parameters alone: others may still have a gradient, by which they would be updated.

    Raises UsageError if param groups were added or removed inside the context.

    Args:
        optimizer: the wrapped one.
        params: owned by this rank, and decoded.
        grads: of each the local gradient, unscaled, in the main param's dtype; None: it has none.
    """
    main_of = {id(param.model): param.main for param in params}
    copies = [param for param in params if param.main is not param.model]
    groups, state = list(optimizer.param_groups), optimizer.state
    listed = [group["params"] for group in groups]
    memory = [to_local(param.main) for param in params]
    # Of fp32 parameters, which are their own main params, the gradient is set aside. It may have another dtype.
    own = [(param.main, param.main.grad, param.main.grad_dtype) for param in params if param.main is param.model]
    try:
        for main, before, _ in own:
            if before is not None and before.dtype != main.dtype:
                main.grad_dtype = None
        for param, grad in zip(params, grads, strict=True):
            param.main.grad = None if grad is None else dtensor_like(grad, param.main)
        # State is keyed by parameter: it moves to the key under which the optimizer looks for it.
        for param in copies:
            if param.model in state:
                state[param.main] = state.pop(param.model)
        for group, models in zip(groups, listed, strict=True):
            group["params"] = [main_of[id(model)] for model in models if id(model) in main_of]
        yield
        if list(map(id, optimizer.param_groups)) != list(map(id, groups)):
            raise UsageError(
                f"{type(optimizer).__name__} added or removed param groups while it held main params; add them by the "
                "wrapper's add_param_group()"
            )
    finally:
        # Groups before what can fail: with main params in them, later steps would train nothing.
        optimizer.param_groups[:] = groups
        for group, models in zip(groups, listed, strict=True):
            group["params"] = models
        for param in params:
            param.main.grad = None
        for main, before, dtype in own:
            if before is not None and before.dtype == dtype:
                main.grad_dtype = dtype
            main.grad = before
        for param in copies:  # its step may have replaced its state
            if param.main in optimizer.state:
                optimizer.state[param.model] = optimizer.state.pop(param.main)
        # `p.data = old`, as some optimizers write it, is a copy: main params stay where they are, whatever is copied.
        moved = [
            (place, param, now)
            for param, place in zip(params, memory, strict=True)
            if (now := to_local(param.main)).data_ptr() != place.data_ptr()
        ]
        for place, param, _ in moved:
            held(param.main).data = place
        for place, _, now in moved:
            place.copy_(now)
