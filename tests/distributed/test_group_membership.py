"""A process group that a rank is not in: torch hands out the number -100, every entrance refuses it by name."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megascale import (
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
    amp,
    build_optimizer,
)
from megascale.checkpoint import Checkpointer
from megascale.errors import ArgumentError
from megascale.grad_sync import GradSync
from tests.pool import RankPool


def _entrances(group: Any, folder: str) -> dict[str, Any]:
    module = nn.Linear(2, 2)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    return {
        "data_parallel": lambda: ParallelGroups(data_parallel=group),
        "grad_stats": lambda: ParallelGroups(data_parallel=None, grad_stats=group),
        "tensor_parallel": lambda: ParallelGroups(tensor_parallel=group),
        "data_shard": lambda: ParallelGroups(data_shard=group),
        "data_replicate": lambda: ParallelGroups(data_replicate=group),
        "expert_data_parallel": lambda: ParallelGroups(expert_data_parallel=group),
        "expert_tensor_parallel": lambda: ParallelGroups(expert_tensor_parallel=group),
        "process_group": lambda: amp.GradScaler("cpu", process_group=group),
        "groups of GradSync": lambda: GradSync(module.named_parameters(), groups=group),
        "groups of MixedPrecisionOptimizer": lambda: MixedPrecisionOptimizer(inner, groups=group),
        "groups of DistributedOptimizer": lambda: DistributedOptimizer(inner, modules=module, groups=group),
        "groups of build_optimizer": lambda: build_optimizer(OptimizerConfig(lr=0.1), module, groups=group),
        "groups of Checkpointer": lambda: Checkpointer(folder, groups=group),
    }


def _outside(folder: str) -> dict[str, str]:
    group = dist.new_group([0])
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    if dist.get_rank() == 0:
        return {}
    messages = {}
    entrances = _entrances(group, folder)
    entrances["mesh"] = lambda: ParallelGroups.from_mesh(mesh)
    entrances["groups, a mesh,"] = lambda: ParallelGroups.of(mesh)
    for name, enter in entrances.items():
        with pytest.raises(ArgumentError) as caught:
            enter()
        messages[name] = str(caught.value)
    return messages


def test_a_group_that_this_rank_is_not_in_is_named(ranks: RankPool, tmp_path: Any) -> None:
    """Each entrance names its argument, this rank and what to do; it said "got -100"."""
    _, messages = ranks.run(2, _outside, str(tmp_path))
    for name, message in messages.items():
        if "mesh" in name:
            assert message.startswith("mesh is ")
            assert "which this rank, 1, is not in; pass each rank a mesh of its own" in message
        else:
            assert message.startswith(f"{name.split()[0]} is a process group that this rank, 1, is not in"), message
            assert "make a group for every rank and pass each its own" in message
