"""Optimizers with parameters on the device, and steps of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megascale import DistributedOptimizer, DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.grad_sync import GradSync
from tests.fake_device.device import FakeDevice
from tests.fake_device.record import Record

CODES: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
"""8-bit moments, of Adam."""
Groups = list[dict[str, Any]]

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1, maximize=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "lion": lambda p: Lion(p, lr=1e-4, weight_decay=0.1),
}


def parameters(
    count: int, dtype: torch.dtype = torch.float16, device: str = "cuda", numel: int = 48
) -> list[nn.Parameter]:
    """Return parameters of ``numel`` elements each, all ones."""
    return [nn.Parameter(torch.ones(numel, dtype=dtype, device=device)) for _ in range(count)]


COUNT, WIDTH = 4, 8
OVERLAP: dict[str, Any] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}


def layers() -> nn.Sequential:
    """Return COUNT layers of WIDTH by WIDTH weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT))).half().cuda()


def optimizer_of(module: nn.Module, layout: str, **options: Any) -> MixedPrecisionOptimizer:
    """Return AdamW in a layout: "replicated", "synced", or a DistributedOptimizer's; each layer is a bucket."""
    # The reference backend is made of operators, which this device can run.
    config = OptimizerConfig(fp16=True, clip_grad=0.5, backend="reference", **options)
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    if layout == "replicated":
        return MixedPrecisionOptimizer(inner, config, scaler())
    if layout == "synced":
        sync = GradSync(module.named_parameters(), bucket_numel=WIDTH * WIDTH)
        return MixedPrecisionOptimizer(inner, config, scaler(), grad_sync=sync)
    return DistributedOptimizer(inner, config, scaler(), modules=module, shard=layout, bucket_numel=WIDTH * WIDTH)


def scaler() -> DynamicGradScaler:
    """Return a scaler on the host."""
    return DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 4, 2)


def wrap(inner: torch.optim.Optimizer, **options: Any) -> MixedPrecisionOptimizer:
    """Wrap an optimizer, as the dtypes of its parameters ask for."""
    dtypes = {param.dtype for group in inner.param_groups for param in group["params"]}
    half = {"fp16": torch.float16 in dtypes, "bf16": dtypes == {torch.bfloat16}}
    config = OptimizerConfig(**(half | {"clip_grad": 1.0} | options))
    return MixedPrecisionOptimizer(inner, config, scaler(), grads_are_scaled=True)


def give_grads(params: Sequence[Tensor]) -> None:
    """Give every parameter a new gradient."""
    for param in params:
        param.grad = torch.ones_like(param)


def take_steps(
    device: FakeDevice, optimizer: Any, params: Sequence[Tensor], count: int = 4, *, moved: bool = False
) -> list[Record]:
    """Return what each of ``count`` steps asked of the device, the first one too.

    Args:
        moved: gradients lie elsewhere in every step, as the default ``zero_grad()`` lets them.
    """
    give_grads(params)
    records = []
    for _ in range(count):
        if moved:
            held = [param.grad for param in params]  # else the next ones would lie where these do
            give_grads(params)
            del held
        with device.watch() as seen:
            optimizer.step()
        records.append(seen)
    return records
