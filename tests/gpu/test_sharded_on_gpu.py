"""DistributedOptimizer on an accelerator: one rank, the recipe with sharded main params, no host sync."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale import DistributedOptimizer, MixedPrecisionOptimizer
from megascale.grad_sync import GradSync
from tests.distributed.test_distributed_optimizer import INNER, batch, config_of, flat, net, same, scaler, weights

pytestmark = pytest.mark.gpu


def _loss(module: torch.nn.Module, step: int, device: torch.device, poison: bool) -> Tensor:
    data = batch(step, 0, torch.float16).to(device)
    loss: Tensor = module(data).float().square().mean()
    return loss * math.inf if poison else loss


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("inner", ["adamw", "sgd"])
def test_bits_of_the_replicated_optimizer(inner: str, overlap: bool) -> None:
    """Invariant 3 on the device: pieces in flat buckets take the same steps as whole parameters, skips included."""
    device = torch.device(str(torch.accelerator.current_accelerator()))
    module, twin = net().to(device), net().to(device)
    options: dict[str, Any] = {"bucket_numel": 300}
    ours = DistributedOptimizer(
        INNER[inner](module),
        config_of(torch.float16),
        scaler(torch.float16),
        modules=module,
        overlap_param_gather=overlap,
        **options,
        grads_are_scaled=True,
    )
    sync = GradSync(twin.named_parameters(), **options)
    theirs = MixedPrecisionOptimizer(
        INNER[inner](twin), config_of(torch.float16), scaler(torch.float16), grad_sync=sync, grads_are_scaled=True
    )
    for step in range(12):
        for optimizer, network in ((ours, module), (theirs, twin)):
            optimizer.zero_grad()
            optimizer.scale_loss(_loss(network, step, device, step in (3, 8))).backward()
            assert bool(optimizer.step().success) == (step not in (3, 8))
    assert same(flat(ours.state_dict()), {name: value.cpu() for name, value in flat(theirs.state_dict()).items()})
    assert same(weights(module), weights(twin))


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
