"""Optimizers with parameters on the device, and steps of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
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
