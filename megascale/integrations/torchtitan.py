"""torchtitan: a container of optimizers and a trainer, each chosen by its Config, for 16-bit weights.

In a config registry, ``MegascaleTrainer.Config`` takes the place of ``Trainer.Config``, and
``MegascaleOptimizers.Config`` that of ``OptimizersContainer.Config``.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan import trainer as titan
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer

from megascale.base_optimizer import MegascaleOptimizer
from megascale.builder import build_grad_scaler
from megascale.chained import ChainedOptimizer
from megascale.errors import ArgumentError, UsageError
from megascale.integrations.named_options import NamedOptions
from megascale.integrations.replaced import replaced
from megascale.optimizer import MixedPrecisionOptimizer

FROM_TITAN = {
    "lr": "optimizer_kwargs of a param group",
    "weight_decay": "optimizer_kwargs of a param group",
    "adam_beta1": "optimizer_kwargs of a param group",
    "adam_beta2": "optimizer_kwargs of a param group",
    "adam_eps": "optimizer_kwargs of a param group",
    "optimizer": "optimizer_name of a param group",
    "clip_grad": "training.max_norm",
    "dtype": "training.dtype",
}
"""Fields that torchtitan's configuration decides, and by which of its names."""


class MegascaleOptimizers(OptimizersContainer):
    """torchtitan's container, whose optimizers hold fp32 main params and share one loss scale and one decision.

    Checkpoints are torchtitan's own: its functions find main params, scale and trackers, and load them on any number of
    ranks.

    Args:
        config: see :class:`Config`.
        model_parts: as torchtitan passes them.

    Raises:
        ArgumentError, ArgumentTypeError: for an option that is unknown, or that torchtitan's configuration decides.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's own fields, and two more."""

        megascale: dict[str, Any] = field(default_factory=dict)
        """Options by name: the loss scale's, ``exp_avg_dtype``, ``store_param_remainders``, ..."""
        fp16: bool | None = None
        """Whether gradients are fp16, and so need a loss scale. None: where weights are fp16. True: fp32 weights too,
        for ``training.mixed_precision_param`` in fp16."""

    optimizers: list[Any]

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        options = NamedOptions.of(config.megascale, "torchtitan's configuration", FROM_TITAN)
        if config.implementation == "fused_opt_states_bf16":
            raise ArgumentError(
                "implementation='fused_opt_states_bf16' makes moments in a hook of the optimizer inside: take "
                "implementation='fused', and megascale={'exp_avg_dtype': 'bf16', 'exp_avg_sq_dtype': 'bf16'}"
            )
        super().__init__(config, model_parts=model_parts)
        own = options.config((param for part in model_parts for param in part.parameters()), {})
        if config.fp16 is not None:
            own = replace(own, fp16=config.fp16, bf16=own.bf16 and not config.fp16)
        scaler = build_grad_scaler(own)
        parts = [MixedPrecisionOptimizer(each, own, scaler) for each in self.optimizers]
        self.optimizer: MegascaleOptimizer = parts[0] if len(parts) == 1 else ChainedOptimizer(parts)
        self.optimizers = [self.optimizer]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Begin the step, clipped to ``max_norm``; return the norm of unscaled gradients, 0 if it will be skipped.

        A step that is skipped is no failure, and torchtitan ends a run at the first norm that is not finite.
        """
        norm = self.optimizer.clip_grad_norm_(max_norm if max_norm > 0 else math.inf)
        return torch.where(norm.isfinite(), norm, torch.zeros_like(norm))


class ScaledLoss:
    """A loss function of torchtitan's whose gradients are multiplied by the loss scale, and whose value is not.

    torchtitan logs the value, and calls ``backward()`` by itself.

    Args:
        loss_fn: returns a loss and metrics.
        optimizer: has the scale.
    """

    def __init__(self, loss_fn: Any, optimizer: MegascaleOptimizer) -> None:
        self.loss_fn = loss_fn
        self.optimizer = optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return the loss and its metrics."""
        loss, metrics = self.loss_fn(*args, **kwargs)
        if loss.requires_grad:
            scale = self.optimizer.get_loss_scale().to(loss.dtype)
            loss.register_hook(lambda grad: grad * scale)
        return loss, metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss_fn, name)


class MegascaleTrainer(titan.Trainer):
    """torchtitan's trainer, whose loss is scaled and whose gradients its optimizers clip.

    Raises:
        UsageError: for optimizers that are not :class:`MegascaleOptimizers`, and for pipeline parallel, whose schedule
            takes the loss before it can be scaled.
    """

    optimizers: Any
    loss_fn: Any

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        """torchtitan's own; ``optimizer`` is a ``MegascaleOptimizers.Config``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.use_loss_scale()

    def use_loss_scale(self) -> None:
        """Let the loss be scaled by what the optimizers hold."""
        if not isinstance(self.optimizers, MegascaleOptimizers):
            raise UsageError(
                f"optimizers are a {type(self.optimizers).__name__}, which has no loss scale: put a "
                "MegascaleOptimizers.Config into the trainer's Config"
            )
        if self.parallel_dims.pp_enabled:
            raise UsageError(
                "pipeline parallel builds its schedule with the loss function before it can be scaled: set "
                "pipeline_parallel_degree=1, or train in bf16 with OptimizersContainer"
            )
        optimizer = self.optimizers.optimizer
        if isinstance(self.loss_fn, ChunkedLossWrapper):  # it runs backward by itself, chunk by chunk
            self.loss_fn.loss_fn = ScaledLoss(self.loss_fn.loss_fn, optimizer)
        else:
            self.loss_fn = ScaledLoss(self.loss_fn, optimizer)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take torchtitan's step, in which its function for clipping is the optimizers' own."""

        def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
            norm: Tensor = self.optimizers.clip_grad_norm_(max_norm)
            return norm

        with replaced(titan.dist_utils, "clip_grad_norm_", clip):  # it has no hook
            return super().train_step(*args, **kwargs)
