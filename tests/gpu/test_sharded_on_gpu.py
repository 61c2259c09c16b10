"""DistributedOptimizer on an accelerator: one rank, the recipe with sharded main params, no host sync."""

import math

import pytest
import torch
from torch import Tensor

from megascale import DistributedOptimizer
from tests.distributed.test_distributed_optimizer import INNER, batch, config_of, net, scaler

pytestmark = pytest.mark.gpu


def _loss(module: torch.nn.Module, step: int, device: torch.device, poison: bool) -> Tensor:
    data = batch(step, 0, torch.float16).to(device)
    loss: Tensor = module(data).float().square().mean()
    return loss * math.inf if poison else loss


def test_step_does_not_stall() -> None:
    """Invariant 5: 20 steps with skips and growth issue no host sync, once a first one has compiled the kernels."""
    if not torch.cuda.is_available():
        pytest.skip("the sync debug mode is CUDA's")
    device = torch.device("cuda")
    module = net().to(device)
    optimizer = DistributedOptimizer(
        INNER["adamw"](module),
        config_of(torch.float16, 1.0),
        scaler(torch.float16),
        modules=module,
        bucket_numel=300,
        grads_are_scaled=True,
    )
    losses = [(step, step in (5, 11)) for step in range(-1, 20)]
    for step, poison in losses:
        optimizer.zero_grad()
        optimizer.scale_loss(_loss(module, step, device, poison)).backward()
        torch.cuda.set_sync_debug_mode("error" if step >= 0 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.num_skipped_steps.item() == 2
