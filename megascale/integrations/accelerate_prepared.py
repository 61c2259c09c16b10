"""An optimizer of megascale's as ``accelerator.prepare`` returns it, also one that FSDP2 has to shard first."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import UsageError
from megascale.integrations.accelerate_scaling import SkipOnDevice
from megascale.optimizer import StepResult
from megascale.utils import validate


class PreparedOptimizer(SkipOnDevice):
    """A MixedPrecisionOptimizer or ChainedOptimizer as :meth:`Accelerator.prepare` returns it.

    Accelerate's own wrapper would reload the optimizer's state dict, which doubles its memory for a moment. Instead,
    parameters must be on the accelerator's device already.
    """

    def __init__(self, optimizer: "MegascaleOptimizer | UnshardedOptimizer") -> None:
        super().__init__(optimizer, None, device_placement=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.optimizer!r}"

    def prepare_grads(self, max_norm: float) -> Tensor:
        """First half of a step, with gradients clipped to ``max_norm`` and to the optimizer's own ``clip_grad``.

        Returns:
            The norm of the unscaled, unclipped gradients: fp32, 0-d, on the device, non-finite where they were.
        """
        if self.optimizer._decision is not None:
            raise UsageError(
                "this step's gradients are clipped already: call clip_grad_norm_() once a step, before "
                "clip_grad_value_(), and optimizer.step() after them"
            )
        norm: Tensor = self.optimizer.clip_grad_norm_(min(max_norm, self.optimizer.clip_grad or torch.inf))
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp the unscaled gradients, after any clipping by norm."""
        validate.positive("clip_value", clip_value)
        if self.optimizer._decision is None:
            self.prepare_grads(torch.inf)
        self.optimizer.clip_grad_value_(clip_value)

    def step(self, closure: Any = None) -> StepResult | None:
        """At the end of an accumulation, take a step, or finish the step that clipping has begun.

        Returns:
            The optimizer's StepResult, without a sync; None while gradients are still accumulated.
        """
        if not self.gradient_state.sync_gradients:
            return None
        result: StepResult = self.optimizer.step(closure)
        self._found_inf = ~result.success
        return result

    def trains(self) -> set[int]:
        """Return the ids of the parameters that this optimizer updates."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return {id(param) for param in params if param.requires_grad}


class UnshardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that becomes one of megascale's once Accelerate's FSDP2 plugin has sharded its parameters.

    The plugin replaces the parameters in the param groups, dtypes and devices included: a model on the host becomes
    shards on an accelerator. Main params and decisions belong where the shards are.

    Args:
        optimizer: over the whole model.
        wrap: makes the optimizer that trains, from ``optimizer`` over the shards.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, wrap: Callable[[torch.optim.Optimizer], MegascaleOptimizer]
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.grad_scaler = None
        self.wrap = wrap

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise UsageError: the optimizer that trains is made by ``accelerator.prepare``."""
        raise UsageError("prepare the optimizer together with its model: accelerator.prepare(model, optimizer)")
