"""fp16 training under FSDP2 (``fully_shard``), whose parameters are DTensors over the data-parallel ranks."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, ParallelGroups
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import INNER, Tiny, model

CONFIG = OptimizerConfig(fp16=True, clip_grad=0.1, log_num_zeros_in_grad=True)
OVERFLOWS = {4: 1, 5: 0, 11: 1}  # step: rank


def _wrapped(module: Tiny, inner: str, groups: ParallelGroups | None) -> MixedPrecisionOptimizer:
    scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
    return MixedPrecisionOptimizer(INNER[inner](module), CONFIG, scaler, groups=groups)


def _data(step: int, rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + rank)).half()


def _loss(module: Tiny, step: int, rank: int) -> Tensor:
    loss: Tensor = module(_data(step, rank)).float().square().mean()
    return loss * math.inf if OVERFLOWS.get(step) == rank else loss


def _train(inner: str) -> list[Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    sharded, whole = model(), model()
    mesh = mesh_of((world,), ("dp",))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in sharded.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    ours, reference = _wrapped(sharded, inner, None), _wrapped(whole, inner, ParallelGroups())
    seen: list[Any] = []
    expected: list[Any] = []
    for step in range(15):
        ours.zero_grad()
        reference.zero_grad()
        ours.scale_loss(_loss(sharded, step, rank)).backward()
        losses = [_loss(whole, step, other) for other in range(world)]
        reference.scale_loss(torch.stack(losses).mean()).backward()
        for optimizer, log in ((ours, seen), (reference, expected)):
            success, norm, zeros = optimizer.step()
            log.append((bool(success), norm.item(), zeros.item(), optimizer.get_loss_scale().item()))
    differences, owned = [], 0
    for (_, main), (_, single) in zip(ours.main_params(), reference.main_params(), strict=True):
        assert isinstance(main, DTensor)
        differences.append((main.full_tensor() - single).abs().max().item())
        owned += main.to_local().numel()
    return [seen, expected, max(differences), owned]


@pytest.mark.default("2-sgd_momentum_fused")
@pytest.mark.parametrize(("world", "inner"), list(product([2, 4], ["adamw_fused", "sgd_momentum_fused"])))
def test_fsdp2_equals_one_process(ranks: RankPool, world: int, inner: str) -> None:
    """fp16 under FSDP2 with overflows on single ranks: skips, scales and zeros equal one process; so do main params.

    Gradients are rounded to fp16 once per rank before they are averaged, once in all in the single process.
    """
    results = ranks.run(world, _train, inner)
    numel = sum(param.numel() for param in model().parameters())
    for seen, expected, difference, _ in results:
        for ours, theirs in zip(seen, expected, strict=True):
            assert ours[0] == theirs[0]
            assert ours[3] == theirs[3]
            if ours[0]:
                assert ours[1] == pytest.approx(theirs[1], rel=2e-3)
                assert ours[2] == theirs[2]
        assert [step for step, row in enumerate(seen) if not row[0]] == sorted(OVERFLOWS)
        assert difference < 2e-3
    assert sum(owned for *_, owned in results) == numel  # each rank's main params are its shard alone


def _moved() -> float:
    module = model(dtype=torch.bfloat16)
    fully_shard(module)
    config = OptimizerConfig(bf16=True, store_param_remainders=True)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters(), 1e-3), config)
    for step in range(3):
        optimizer.zero_grad()
        module(_data(step, 0).bfloat16()).float().square().mean().backward()
        optimizer.step()
    before = [main.to_local().clone() for _, main in optimizer.main_params() if isinstance(main, DTensor)]
    module.to("cpu")
    after = [main.to_local() for _, main in optimizer.main_params() if isinstance(main, DTensor)]
    return max((one - other).abs().max().item() for one, other in zip(before, after, strict=True) if one.numel())


def test_a_move_keeps_remainders(ranks: RankPool) -> None:
    """FSDP2's ``module.to()`` puts other tensors of the same elements into the DTensors: nobody wrote a weight."""
    assert ranks.run(1, _moved) == [0.0]
