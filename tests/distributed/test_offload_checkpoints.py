"""Checkpoints of runs whose main params and state live in host memory: any other run goes on from them, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer
from megascale.grad_sync import GradSync
from megascale.utils.collectives import full_tensor
from megascale.utils.nests import map_tensors
from tests.checkpoint_cases import differences, state_of
from tests.meshes import mesh_of
from tests.pool import RankPool

CODES: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
HELD: dict[str, Any] = {"store_param_remainders": True}
THERE: dict[str, Any] = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
HALF = THERE | {"optimizer_offload_fraction": 0.5}
WIDTH = 64
"""Whole groups of 32 elements in each rank's part of a bias."""
STEPS = 2
"""Between two checkpoints."""

Hop = tuple[str, int, dict[str, Any]]
"""How a run holds parameters, on how many ranks, and where main params live."""
HOPS: list[Hop] = [
    ("elements", 2, THERE),
    ("replicated", 1, {}),
    ("fsdp2", 2, THERE),
    ("replicated", 1, {}),
    ("parameters", 2, HALF),
    ("fsdp2", 2, {}),
    ("synced", 2, HALF),
    ("elements", 2, {}),
    ("replicated", 1, THERE),
    ("fsdp2", 2, HALF),
]


def _build(held: str, options: dict[str, Any]) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).half()
    if held == "fsdp2":
        mesh = mesh_of((dist.get_world_size(),), ("dp",))
        for layer in (*module, module):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    # Without a clip, whose norm is a sum in another order on each layout.
    config, scaler = OptimizerConfig(fp16=True, **options), DynamicGradScaler(2.0**10)
    if held in ("elements", "parameters"):
        return module, DistributedOptimizer(inner, config, scaler, modules=module, bucket_numel=300, shard=held)
    sync = GradSync(module.named_parameters(), bucket_numel=300) if held == "synced" else None
    return module, MixedPrecisionOptimizer(inner, config, scaler, grad_sync=sync)


def _train(module: nn.Module, optimizer: MixedPrecisionOptimizer, first: int, last: int) -> None:
    """Steps on the same samples on all ranks, some of which overflow."""
    for step in range(first, last):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).half()
        optimizer.zero_grad()
        loss = module(inputs).float().square().mean() * (torch.inf if step % 4 == 2 else 1.0)
        optimizer.scale_loss(loss).backward()
        optimizer.step()


def _whole(module: nn.Module, optimizer: MixedPrecisionOptimizer) -> dict[str, Any]:
    """Return copies of everything, DTensors whole, as rows: scales of a DTensor have another shape."""

    def whole(value: Tensor) -> Tensor:
        return full_tensor(value.detach()).cpu().clone().reshape(-1)

    found: dict[str, Any] = map_tensors(whole, state_of(module, optimizer))
    return found


def _go_on(hop: Hop, options: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """Load what the hop before has saved, train, and save while the last update may be under way."""
    held, _, where = hop
    module, optimizer = _build(held, options | where)
    checkpointer = Checkpointer(folder)
    if number:
        checkpointer.load(module, optimizer)
    _train(module, optimizer, number * STEPS, (number + 1) * STEPS)
    checkpointer.save((number + 1) * STEPS, module, optimizer)
    return _whole(module, optimizer)


def _one_life(options: dict[str, Any], hops: int) -> list[dict[str, Any]]:
    """Return what one rank without offload has after the steps of each hop."""
    module, optimizer = _build("replicated", options)
    found = []
    for number in range(hops):
        _train(module, optimizer, number * STEPS, (number + 1) * STEPS)
        found.append(_whole(module, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, CODES | HELD], ids=["fp32", "compact"])
def test_checkpoints_travel(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """Offloaded on two ranks, plain on one, FSDP2, shards of both kinds, fractions: each has the bits of one life."""
    [life] = ranks.run(1, _one_life, options, len(HOPS))
    for number, (hop, expected) in enumerate(zip(HOPS, life, strict=True)):
        for state in ranks.run(hop[1], _go_on, hop, options, tmp_path, number):
            assert differences(expected, state) == [], hop
