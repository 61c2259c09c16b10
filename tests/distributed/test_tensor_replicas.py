"""Invariant 13: tensor-parallel ranks that hold a whole parameter are compared, as data-parallel ranks are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale import ConstantGradScaler, DistributedOptimizer, MixedPrecisionOptimizer, OptimizerConfig, ParallelGroups
from megascale.errors import UsageError
from megascale.grad_sync import GradSync
from tests.checkpoint_cases import message_of
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import Bag

CONFIG = OptimizerConfig(fp16=True, clip_grad=1.0)
WAYS = ("plain", "GradSync", "DistributedOptimizer")


def _layer(way: str, tp: int) -> tuple[Bag, MixedPrecisionOptimizer]:
    """A matrix that is split over ``tp`` ranks, and a norm's weight that all of them hold."""
    mesh = mesh_of((dist.get_world_size() // tp, tp), ("dp", "tp"))
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(8, 6, generator=generator).half()
    module = Bag([whole.chunk(tp)[mesh.get_local_rank("tp")].clone(), torch.ones(6).half()])
    module[0].tensor_model_parallel = True  # type: ignore[attr-defined]
    inner = torch.optim.SGD(module.named_parameters(), lr=0.1)
    options: dict[str, Any] = {"groups": mesh, "grads_are_scaled": True}
    if way == "DistributedOptimizer":
        return module, DistributedOptimizer(inner, CONFIG, ConstantGradScaler(2.0), modules=module, **options)
    sync = GradSync(module.named_parameters(), groups=mesh) if way == "GradSync" else None
    return module, MixedPrecisionOptimizer(inner, CONFIG, ConstantGradScaler(2.0), grad_sync=sync, **options)


def _set_grads(module: Bag, partial: bool, noise: float = 0.0) -> None:
    """Give gradients by a backward. ``partial``: of the norm's weight, this rank's part of the sequence alone."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(9)
    parts = torch.randn(dist.get_world_size(), 6, generator=generator).half()
    norm = parts[rank] if partial else parts.float().sum(0).half() * (1 + noise * (rank % 2))
    (module[0].float().sum() + (module[1].float() * norm.float()).sum()).backward()


def _forgotten(way: str, tp: int) -> tuple[str, bool]:
    module, optimizer = _layer(way, tp)
    before = module[1].detach().clone()
    _set_grads(module, partial=True)
    return message_of(UsageError, optimizer.step), torch.equal(module[1], before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2), (4, 4)])
def test_a_forgotten_all_reduce_is_named(ranks: RankPool, way: str, world: int, tp: int) -> None:
    """Invariant 13: under sequence parallelism each rank has the norm's gradient of its part of the sequence. Every
    rank would count its own, and the copies would part. All raise, and name the weight, before a bit has changed.
    """
    if way == "plain" and tp < world:
        way = "GradSync"  # data-parallel ranks must have reduced
    for message, unchanged in ranks.run(world, _forgotten, way, tp):
        assert "tensor-parallel ranks that hold the same parameters have different gradients, of 'params.1'" in message
        assert "sequence parallelism" in message
        assert unchanged


def _reduced(way: str, tp: int, noise: float) -> bool:
    module, optimizer = _layer(way, tp)
    _set_grads(module, partial=False, noise=noise)
    return bool(optimizer.step().success)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("noise", [0.0, 1e-5])
def test_reduced_gradients_are_accepted(ranks: RankPool, way: str, noise: float) -> None:
    """Also where each rank has added them up in another order."""
    assert ranks.run(2, _reduced, way, 2, noise) == [True] * 2
    assert way == "plain" or ranks.run(4, _reduced, way, 2, noise) == [True] * 4


def _experts(declared: str) -> str:
    """Each rank holds another whole expert, and both hold the same router."""
    groups = ParallelGroups(
        data_parallel=None,
        tensor_parallel=dist.group.WORLD,
        expert_data_parallel=None,
        **({"expert_tensor_parallel": None} if declared == "as they lie" else {}),
    )
    module = Bag([torch.ones(4).half(), torch.full((4,), 1.0 + dist.get_rank()).half()])
    module[1].allreduce = False  # type: ignore[attr-defined]
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(module.named_parameters(), lr=0.1),
        CONFIG,
        ConstantGradScaler(2.0),
        groups=groups,
        grads_are_scaled=True,
    )
    module[0].grad, module[1].grad = torch.ones(4).half(), torch.full((4,), 2.0 + dist.get_rank()).half()
    if declared == "as they lie":
        return str(optimizer.step().grad_norm.item())
    return message_of(UsageError, optimizer.step)


def test_experts_that_are_declared_otherwise_than_they_lie_are_named(ranks: RankPool) -> None:
    """Invariant 13: experts of their own on tensor-parallel ranks, which without ``expert_tensor_parallel=None`` would
    be counted as copies of one expert.
    """
    for message in ranks.run(2, _experts, "as copies"):
        assert "tensor-parallel ranks" in message
        assert "of 'params.1'" in message
        assert "ParallelGroups(expert_tensor_parallel=None)" in message
    norm = str(torch.tensor((4 * 1 + 4 * 4 + 4 * 9) / 4.0).sqrt().item())
    assert ranks.run(2, _experts, "as they lie") == [norm] * 2


def _undeclared() -> str:
    """A split matrix without Megatron's attribute."""
    module, optimizer = _layer("plain", 2)
    del module[0].tensor_model_parallel  # type: ignore[attr-defined]
    module[0].grad = torch.full_like(module[0], 1.0 + dist.get_rank())
    module[1].grad = torch.ones(6).half()
    return message_of(UsageError, optimizer.step)


def test_a_split_parameter_that_is_not_marked_is_named(ranks: RankPool) -> None:
    """Invariant 13: the norm would count one rank's part of the matrix as all of it."""
    for message in ranks.run(2, _undeclared):
        assert "of 'params.0'" in message
        assert "tensor_model_parallel = True" in message
