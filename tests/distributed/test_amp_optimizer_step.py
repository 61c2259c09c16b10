"""optimizer_step on two ranks: DistributedDataParallel, FSDP2 and tensor parallel equal torch's loop in one process."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megascale.amp import GradScaler, optimizer_step
from tests.counting import OperatorCounter
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import Sign, Tiny

CLIPPINGS = {"none": (None, None), "norm": (0.3, None), "both": (0.3, 0.02)}
OVERFLOWS = {2: 1, 5: 0}  # step: rank
STEPS = 8


class Poisoned(Tiny):
    """Returns its loss. ``poison`` goes to the gradient of one element, which one rank's shard holds."""

    def forward(self, x: Tensor, poison: float = 0.0) -> Tensor:
        """Return a 0-d loss."""
        return super().forward(x).square().mean() + poison * self.first.weight[0, 0]


def _module() -> Poisoned:
    torch.manual_seed(0)
    return Poisoned()


def _spread(how: str, module: Poisoned) -> nn.Module:
    """Spread ``module`` over all ranks."""
    if how == "ddp":
        return DistributedDataParallel(module)
    mesh = mesh_of((dist.get_world_size(),), ("ranks",))
    if how == "fsdp2":
        fully_shard(module, mesh=mesh)
        return module
    return parallelize_module(module, mesh, {"second": ColwiseParallel(), "head": RowwiseParallel()})


def _optimizer(fused: bool, module: nn.Module) -> torch.optim.Optimizer:
    # torch's fused kernels take DTensors and plain tensors in lists of their own.
    kinds = [[p for p in module.parameters() if isinstance(p, DTensor) == kind] for kind in (True, False)]
    groups = [{"params": params} for params in kinds if params]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True) if fused else Sign(groups)


def _loss(module: nn.Module, how: str, step: int, rank: int) -> Tensor:
    seed = step if how == "tensor parallel" else 100 * rank + step  # tensor-parallel ranks see the same data
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = module(x, math.inf if OVERFLOWS.get(step) == rank else 0.0)
    return loss


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _train(how: str, fused: bool, clipping: str, scaler_of: str) -> tuple[list[Any], list[Tensor], int]:
    """Return each step's outcome, the parameters at the end, and the host reads of this rank's steps."""
    norm, value = CLIPPINGS[clipping]
    module = _spread(how, _module())
    optimizer = _optimizer(fused, module)
    scaler = None if scaler_of == "none" else GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    rows, reads = [], 0
    for step in range(STEPS):
        loss = _loss(module, how, step, dist.get_rank())
        with OperatorCounter() as counter:
            success, total, _ = optimizer_step(loss, optimizer, scaler, norm, value)
        reads += counter.host_reads
        rows.append((bool(success), total.item(), 1.0 if scaler is None else scaler.get_scale()))
    return rows, [_whole(param) for param in module.parameters()], reads


def _reference(how: str, fused: bool, clipping: str, scaled: bool, world: int) -> tuple[list[Any], list[Tensor]]:
    """Train in one process, with torch's scaler in its loop, on the data of all ranks."""
    norm, value = CLIPPINGS[clipping]
    module = _module()
    optimizer = _optimizer(fused, module)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 if scaled else 1.0, growth_interval=3 if scaled else 10**6)
    rows = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [_loss(module, how, step, rank) for rank in range(world)]
        scaler.scale(torch.stack(losses).mean()).backward()
        scaler.unscale_(optimizer)
        total = torch.nn.utils.clip_grad_norm_(module.parameters(), norm or math.inf)
        if value is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), value)
        scaler.step(optimizer)
        scaler.update(None if scaled else 1.0)
        rows.append((bool(total.isfinite()), total.item(), scaler.get_scale()))
    return rows, [param.detach() for param in module.parameters()]


@pytest.mark.default("both-False-tensor parallel-ours")
@pytest.mark.parametrize(
    ("clipping", "fused", "how", "scaler_of"),
    [
        ("norm", True, "ddp", "ours"),
        ("both", False, "fsdp2", "ours"),
        ("both", True, "fsdp2", "ours"),
        ("none", True, "tensor parallel", "ours"),
        ("both", False, "tensor parallel", "ours"),
        ("norm", True, "ddp", "none"),
        ("norm", True, "fsdp2", "none"),
    ],
)
def test_equals_one_process(ranks: RankPool, how: str, fused: bool, clipping: str, scaler_of: str) -> None:
    """An inf in one element of one rank's shard: all ranks skip, also without a scaler, as in bf16; norms, scales and
    parameters are those of one process.

    Under tensor parallelism the norm counts sharded gradients once per element and replicated ones once in all.
    """
    expected, params = _reference(how, fused, clipping, scaler_of != "none", 2)
    assert [step for step, row in enumerate(expected) if not row[0]] == sorted(OVERFLOWS)
    for rows, got, reads in ranks.run(2, _train, how, fused, clipping, scaler_of):
        for row, other in zip(rows, expected, strict=True):
            assert (row[0], row[2]) == (other[0], other[2])
            assert not row[0] or row[1] == pytest.approx(other[1], rel=1e-5)
        for mine, whole in zip(got, params, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-6)
        assert reads == (0 if fused else STEPS)
