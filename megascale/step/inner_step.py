"""The wrapped optimizer's own ``step()``, which only its wrapper may call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor

from megascale.errors import UsageError


class InnerStep:
    """Calls an optimizer's ``step()``, and refuses calls from elsewhere, by a torch hook that lives as long as this.

    Such a call would update 16-bit model params with scaled gradients, which main params would take for loaded weights.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_ours = False
        myself = ref(self)

        def refuse(inner: torch.optim.Optimizer, *_: Any) -> None:
            caller = myself()
            if caller is not None and not caller._is_ours:
                raise UsageError(
                    f"{type(inner).__name__}.step() was called, but a MixedPrecisionOptimizer wraps this optimizer: "
                    "call the wrapper's step(), which unscales the gradients and updates main params. To train without "
                    "it again, drop the wrapper"
                )

        self._hook = optimizer.register_step_pre_hook(refuse)
        finalize(self, self._hook.remove)

    def __call__(self) -> None:
        """Take the step."""
        self._is_ours = True
        try:
            self._optimizer.step()
        finally:
            self._is_ours = False

    @property
    def is_hooked(self) -> bool:
        """Whether the step has hooks other than ours."""
        pre_hooks, post_hooks = self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks
        return bool(post_hooks) or len(pre_hooks) > (self._hook.id in pre_hooks)


@contextmanager
def replaceable_grad(param: Tensor) -> Iterator[None]:
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
