"""Averages and schedules on several ranks: sharded main params, DTensors, and one rank's overflow."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, ParallelGroups
from megascale.averages import AveragedMainParams
from megascale.errors import StateDictError, UsageError
from megascale.schedules import LandedLRScheduler
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import INNER, bits_equal, model, same_bits

CONFIG = OptimizerConfig(fp16=True)
OVERFLOWS = {1: 1, 4: 0, 5: 1}  # step: rank
STEPS = 8


def _scaler() -> DynamicGradScaler:
    return DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)


def _train(optimizer: MixedPrecisionOptimizer, module: nn.Module, averages: AveragedMainParams) -> list[float]:
    """Train with overflows on single ranks; returns the rates, as each step used them."""
    schedule = LandedLRScheduler(ExponentialLR(optimizer, 0.5))
    rates = []
    for step in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).half()
        loss = module(inputs).float().square().mean()
        optimizer.scale_loss(loss * math.inf if OVERFLOWS.get(step) == dist.get_rank() else loss).backward()
        success = optimizer.step().success
        schedule.step(success)
        averages.update_parameters(success=success)
    return rates


def _averages(module: nn.Module, optimizer: MixedPrecisionOptimizer) -> AveragedMainParams:
    return AveragedMainParams(module, optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.7))


def _sharded_and_replicated() -> dict[str, Any]:
    results: dict[str, Any] = {}
    states = []
    for kind in ("replicated", "sharded"):
        module = model()
        inner = INNER["adamw_fused"](module)
        optimizer: MixedPrecisionOptimizer
        if kind == "sharded":
            optimizer = DistributedOptimizer(inner, CONFIG, _scaler(), modules=module, bucket_numel=32)
        else:
            # Nothing reduces its gradients: they are the same on every rank, whose inputs are.
            optimizer = MixedPrecisionOptimizer(inner, CONFIG, _scaler())
        averages = _averages(module, optimizer)
        results[f"{kind}_rates"] = _train(optimizer, module, averages)
        states.append(averages.state_dict())
        with averages.applied():
            results[kind] = {name: value.clone() for name, value in module.state_dict().items()}
        results[f"{kind}_numel"] = sum(average.numel() for _, average in averages.averages())
    results["same"] = same_bits(states[0]["averages"], states[1]["averages"])
    results["averages"] = states[1]
    results["loaded"] = _load_elsewhere(states[1])
    return results


def _load_elsewhere(state: dict[str, Any]) -> bool:
    """Whether a state loads into another optimizer's averages and comes out the same; one bad rank stops all."""
    module = model(seed=1)
    optimizer = DistributedOptimizer(
        INNER["adamw_fused"](module), CONFIG, _scaler(), modules=module, bucket_numel=16, broadcast_params=True
    )
    averages = _averages(module, optimizer)
    broken = state | {"n_averaged": 3} if dist.get_rank() == 1 else state
    before = averages.state_dict()
    with pytest.raises(StateDictError, match=r"rank 1: .*n_averaged"):
        averages.load_state_dict(broken)
    assert same_bits(averages.state_dict()["averages"], before["averages"])
    averages.load_state_dict(state)
    return same_bits(averages.state_dict()["averages"], state["averages"])


def test_sharded_averages(ranks: RankPool) -> None:
    """Each rank averages its pieces only; whole, they are bitwise the replicated ones, in the model too. Rates agree on
    every rank though single ranks overflow.
    """
    results = ranks.run(2, _sharded_and_replicated)
    numel = sum(param.numel() for param in model().parameters())
    for result in results:
        assert result["same"]
        assert result["loaded"]
        assert same_bits(result["sharded"], result["replicated"])
        assert result["sharded_rates"] == result["replicated_rates"] == results[0]["sharded_rates"]
        assert result["averages"]["n_averaged"].item() == STEPS - len(OVERFLOWS)
        landed = [sum(other not in OVERFLOWS for other in range(step)) for step in range(STEPS)]
        assert result["sharded_rates"] == [0.01 * 0.5**count for count in landed]
        assert result["replicated_numel"] == numel
    assert sum(result["sharded_numel"] for result in results) == numel


def _fsdp2() -> list[bool]:
    sharded, whole, other = model(), model(), model(seed=1)
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    for module in (sharded, other):
        for layer in module.children():
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    ours = MixedPrecisionOptimizer(INNER["adamw_fused"](sharded), CONFIG, _scaler())
    reference = MixedPrecisionOptimizer(INNER["adamw_fused"](whole), CONFIG, _scaler(), groups=ParallelGroups())
    averages, expected = _averages(sharded, ours), _averages(whole, reference)
    for step in range(STEPS):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).half()
        for module, optimizer, each in ((sharded, ours, averages), (whole, reference, expected)):
            optimizer.zero_grad()
            loss = module(inputs).float().square().mean()
            overflows = step in OVERFLOWS and (module is whole or OVERFLOWS[step] == dist.get_rank())
            optimizer.scale_loss(loss * math.inf if overflows else loss).backward()
            each.update_parameters(success=optimizer.step().success)
    with pytest.raises(UsageError, match="fully_shard; load model_state_dict"), averages.applied():
        pass
    other.load_state_dict(averages.model_state_dict())
    state = averages.state_dict()
    assert all(isinstance(value, DTensor) for value in state["averages"].values())
    again = _averages(other, MixedPrecisionOptimizer(INNER["adamw_fused"](other), CONFIG, _scaler()))
    again.load_state_dict(state)
    checks = []
    for (name, average), (_, loaded), (_, single) in zip(
        averages.averages(), again.averages(), expected.averages(), strict=True
    ):
        assert isinstance(average, DTensor)
        assert isinstance(loaded, DTensor)
        weight = other.get_parameter(name)
        assert isinstance(weight, DTensor)
        checks.append(bits_equal(average.full_tensor(), single))
        checks.append(bits_equal(loaded.full_tensor(), single))
        checks.append(bits_equal(weight.full_tensor().detach(), single.half()))
    return checks


@pytest.mark.default("2")
@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2_averages(ranks: RankPool, world: int) -> None:
    """Of DTensors each rank averages its part: whole, bitwise a single process's, and a second sharded model takes it.

    Every rank computes the same gradients, so that their mean over 2 or 4 ranks is exact.
    """
    for checks in ranks.run(world, _fsdp2):
        assert all(checks)
