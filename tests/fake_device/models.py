"""Whole models on the device, and what trains them over ranks: of a world of two that are not there, or alone."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import ChainedOptimizer, DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.grad_sync import GradSync
from tests.fake_device.training import scaler
from tests.training import Tiny

CONFIG = OptimizerConfig(fp16=True, clip_grad=1.0)

Built = tuple[Any, Callable[[], Tensor]]
"""An optimizer, and what computes a loss."""


def world_of_two() -> None:
    """Let this process be rank 0 of two. The other one is not there: collectives move nothing, and end at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


def model() -> nn.Module:
    """Return a small fp16 model of two parts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Tiny()).half().cuda()


def loss_of(module: nn.Module) -> Callable[[], Tensor]:
    """Return what runs the module forward, on the same inputs each time."""
    x = torch.ones(8, 4, dtype=torch.float16, device="cuda")
    return lambda: module(x).float().square().mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's AdamW of all parameters, by name."""
    return torch.optim.AdamW(module.named_parameters(), lr=1e-3)


def sharded(module: nn.Module, **options: Any) -> Built:
    """Return a DistributedOptimizer."""
    return DistributedOptimizer(adamw(module), CONFIG, scaler(), modules=module, **options), loss_of(module)


def synced(module: nn.Module, **options: Any) -> Built:
    """Return a MixedPrecisionOptimizer with a GradSync."""
    sync = GradSync(module.named_parameters(), **options)
    return MixedPrecisionOptimizer(adamw(module), CONFIG, scaler(), grad_sync=sync), loss_of(module)


def chained(module: nn.Module) -> Built:
    """Return a chain of two DistributedOptimizers, each of one part."""
    shared, params = scaler(), dict(module.named_parameters())
    parts = [[(name, param) for name, param in params.items() if name.startswith(start)] for start in ("0.", "1.")]
    inner = [torch.optim.AdamW(part, lr=1e-3) for part in parts]
    members = [DistributedOptimizer(one, CONFIG, shared, modules=module) for one in inner]
    return ChainedOptimizer(members), loss_of(module)


BUILD: dict[str, Callable[[nn.Module], Built]] = {
    "sharded": sharded,
    "sharded_overlap": lambda module: sharded(module, overlap_param_gather=True, bucket_numel=30),
    "sharded_bf16_travels": lambda module: sharded(module, reduce_dtype=torch.bfloat16),
    "synced": synced,
    "synced_late": lambda module: synced(module, overlap=False),
    "chained": chained,
}
