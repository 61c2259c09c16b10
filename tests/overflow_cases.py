"""What the tests of overflow reports share: a model that plants inf or NaN in one gradient, trained in every way."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megascale import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    StepResult,
    amp,
)
from megascale.grad_sync import GradSync
from megascale.step.overflow_report import OverflowReport
from tests.meshes import mesh_of

SCALE = 2.0**4
POISON = {"inf": [math.inf, -math.inf], "nan": [math.nan], "inf and nan": [math.nan, math.inf, math.inf]}


class _Plant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: list[float]) -> Tensor:
        ctx.values = values
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad.view(-1)[: len(ctx.values)] = torch.tensor(ctx.values, dtype=grad.dtype)
        return grad, None


class Planted(nn.Module):
    """Three layers. The gradient of ``middle.weight`` begins with :attr:`values`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.values: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [2]."""
        weight = _Plant.apply(self.middle.weight, self.values)
        hidden = nn.functional.linear(self.first(x), weight, self.middle.bias)
        out: Tensor = self.head(hidden).mean(0)
        return out


Setting = tuple[nn.Module, Any, Planted]


def _scaler() -> DynamicGradScaler:
    return DynamicGradScaler(SCALE, 1.0, hysteresis=1)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.named_parameters(), lr=1e-3)


def plain(backend: str) -> Setting:
    """Every rank has a loss, and nobody reduces."""
    model = Planted().half()
    config = OptimizerConfig(fp16=True, backend=backend)
    return model, MixedPrecisionOptimizer(_adamw(model), config, _scaler(), replicas_may_differ=True), model


def ddp(backend: str) -> Setting:
    """DistributedDataParallel averages."""
    model = Planted().half()
    config = OptimizerConfig(fp16=True, backend=backend)
    return DistributedDataParallel(model), MixedPrecisionOptimizer(_adamw(model), config, _scaler()), model


def grad_sync(backend: str) -> Setting:
    """GradSync averages."""
    model = Planted().half()
    config = OptimizerConfig(fp16=True, backend=backend)
    sync = GradSync(model.named_parameters())
    return model, MixedPrecisionOptimizer(_adamw(model), config, _scaler(), grad_sync=sync), model


def sharded(backend: str) -> Setting:
    """Each rank keeps a shard."""
    model = Planted().half()
    config = OptimizerConfig(fp16=True, backend=backend)
    return model, DistributedOptimizer(_adamw(model), config, _scaler(), modules=model), model


def fsdp2(backend: str) -> Setting:
    """FSDP2 shards parameters."""
    model = Planted().half()
    _fully_sharded(model)
    config = OptimizerConfig(fp16=True, backend=backend)
    return model, MixedPrecisionOptimizer(_adamw(model), config, _scaler()), model


def chained(backend: str) -> Setting:
    """Two optimizers, one of them sharded."""
    model, scaler = Planted().half(), _scaler()
    config = OptimizerConfig(fp16=True, backend=backend)
    weights = [(name, param) for name, param in model.named_parameters() if name.endswith("weight")]
    biases = [(name, param) for name, param in model.named_parameters() if name.endswith("bias")]
    parts = [
        DistributedOptimizer(torch.optim.AdamW(weights, lr=1e-3), config, scaler, modules=model),
        MixedPrecisionOptimizer(torch.optim.AdamW(biases, lr=1e-3), config, scaler, grad_sync=GradSync(biases)),
    ]
    return model, ChainedOptimizer(parts), model


def _fully_sharded(model: Planted) -> None:
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    for layer in (model.first, model.head):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


class AmpLoop:
    """torch.amp's loop, with an optimizer's methods."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = _adamw(model)
        self.scaler = amp.GradScaler("cpu", SCALE, min_scale=1.0)
        self.zero_grad = self.optimizer.zero_grad
        self.scale_loss = self.scaler.scale
        self.last_overflow = self.scaler.last_overflow

    def step(self) -> StepResult:
        """Step and update."""
        self.scaler.step(self.optimizer)
        landed = torch.stack(list(self.scaler._found_inf_per_device(self.optimizer).values())).sum() == 0
        self.scaler.update()
        return StepResult(landed, landed, landed)


def torch_amp(backend: str) -> Setting:
    """DistributedDataParallel under torch.amp's loop; the backend is that of the machine."""
    model = Planted()
    return DistributedDataParallel(model), AmpLoop(model), model


def amp_fsdp2(backend: str) -> Setting:
    """FSDP2 under torch.amp's loop."""
    model = Planted()
    _fully_sharded(model)
    return model, AmpLoop(model), model


SETTINGS: dict[str, Callable[[str], Setting]] = {
    "plain": plain,
    "ddp": ddp,
    "grad_sync": grad_sync,
    "sharded": sharded,
    "fsdp2": fsdp2,
    "chained": chained,
    "amp": torch_amp,
    "amp_fsdp2": amp_fsdp2,
}


def step(network: nn.Module, optimizer: Any) -> bool:
    """Take one step. Returns whether it landed."""
    optimizer.zero_grad()
    dtype = next(network.parameters()).dtype
    optimizer.scale_loss(network(torch.ones(3, 6, dtype=dtype)).float().sum()).backward()
    return bool(optimizer.step().success)


def owner_of_scale(optimizer: Any) -> Any:
    """Return what report_overflows() takes: the scaler of torch.amp's loop, else the optimizer."""
    return optimizer.scaler if isinstance(optimizer, AmpLoop) else optimizer


def report_of(optimizer: Any, **options: Any) -> OverflowReport:
    """Return the report of the last overflow, which there must have been."""
    report: OverflowReport | None = optimizer.last_overflow(**options)
    if report is None:
        raise LookupError("no step was skipped")
    return report


def rows_of(report: OverflowReport | None) -> list[tuple[Any, ...]]:
    """Return (parameter, rank, kind, inf, nan) of each entry."""
    assert report is not None
    return [(one.parameter, one.rank, one.kind, one.num_inf, one.num_nan) for one in report.entries]
