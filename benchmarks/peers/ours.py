"""megascale: DistributedOptimizer, and MixedPrecisionOptimizer with replicated main params."""

from typing import Any

import torch
from torch import Tensor

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.grad_sync import GradSync
from peers.given import CLIP, EPS, GROWTH_INTERVAL, HYSTERESIS, LR, SCALE, WEIGHT_DECAY, GivenModel, Setup


class Megascale:
    """Either optimizer on a plain model: its hooks reduce during backward."""

    def __init__(self, model: GivenModel, optimizer: MixedPrecisionOptimizer, grad_sync: GradSync) -> None:
        self.model = model
        self.optimizer = optimizer
        self.grad_sync = grad_sync

    def reduce(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.optimizer.zero_grad()
        self.optimizer.scale_loss(self.model(torch.zeros_like(self.optimizer.get_loss_scale()))).backward()
        self.grad_sync.finish()

    def step(self) -> None:
        """See :class:`peers.given.Contender`."""
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        """See :class:`peers.given.Contender`."""
        return list(self.model.parameters())


def _parts(model: GivenModel, setup: Setup) -> tuple[torch.optim.Optimizer, OptimizerConfig, DynamicGradScaler]:
    inner = torch.optim.AdamW(model.named_parameters(), lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY)
    half = setup.dtype == torch.float16
    config = OptimizerConfig(fp16=half, bf16=not half, clip_grad=CLIP)
    return inner, config, DynamicGradScaler(SCALE, 1.0, 2.0, 0.5, GROWTH_INTERVAL, HYSTERESIS)


def _bucket(setup: Setup) -> dict[str, Any]:
    return {} if setup.bucket_numel is None else {"bucket_numel": setup.bucket_numel}


def sharded(model: GivenModel, setup: Setup) -> Megascale:
    """Return DistributedOptimizer. Option "grad_dtype": of main grads and of what travels."""
    inner, config, scaler = _parts(model, setup)
    optimizer = DistributedOptimizer(
        inner,
        config,
        scaler,
        modules=model,
        grad_dtype=setup.options.get("grad_dtype"),
        grads_are_scaled=True,
        **_bucket(setup),
    )
    return Megascale(model, optimizer, optimizer.grad_sync)


def replicated(model: GivenModel, setup: Setup) -> Megascale:
    """Return MixedPrecisionOptimizer with GradSync: every rank has all main params."""
    inner, config, scaler = _parts(model, setup)
    grad_sync = GradSync(model.named_parameters(), **_bucket(setup))
    optimizer = MixedPrecisionOptimizer(inner, config, scaler, grad_sync=grad_sync, grads_are_scaled=True)
    return Megascale(model, optimizer, grad_sync)
