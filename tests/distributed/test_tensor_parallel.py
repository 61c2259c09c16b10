"""Norm, zeros and decision with tensor-parallel parameters: Megatron's attributes and DTensors."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig, ParallelGroups
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import INNER, Bag, bits_equal

CONFIG = OptimizerConfig(fp16=True, clip_grad=1.0, log_num_zeros_in_grad=True)


def _whole() -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and gradients of the unsplit model, the same on every rank: [8, 6] and [5]."""
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(8, 6, generator=generator).half(), torch.randn(5, generator=generator).half()]
    grads = [torch.randn(8, 6, generator=generator).half(), torch.randn(5, generator=generator).half()]
    grads[0][:3] = 0
    grads[1][1] = 0
    return weights, grads


def _single_process(inner: str) -> tuple[float, float, list[Tensor]]:
    weights, grads = _whole()
    module = Bag(weights)
    optimizer = MixedPrecisionOptimizer(
        INNER[inner](module), CONFIG, ConstantGradScaler(2.0), groups=ParallelGroups(), grads_are_scaled=True
    )
    for param, grad in zip(module.parameters(), grads, strict=True):
        param.grad = grad.clone()
    result = optimizer.step()
    return result.grad_norm.item(), result.num_zeros_in_grad.item(), [main for _, main in optimizer.main_params()]


def _megatron(inner: str, tp: int) -> Any:
    """Split the matrix by rows over tp ranks, keep the vector on all of them; add a shared copy that must not count."""
    mesh = mesh_of((dist.get_world_size() // tp, tp), ("dp", "tp"))
    rank = mesh.get_local_rank("tp")
    weights, grads = _whole()
    module = Bag([weights[0].chunk(tp)[rank].clone(), weights[1].clone(), torch.ones(3).half()])
    module[0].tensor_model_parallel = True  # type: ignore[attr-defined]
    module[2].shared = True  # type: ignore[attr-defined]
    optimizer = MixedPrecisionOptimizer(
        INNER[inner](module), CONFIG, ConstantGradScaler(2.0), groups=mesh, grads_are_scaled=True
    )
    local = [grads[0].chunk(tp)[rank], grads[1], torch.full((3,), 9.0).half()]
    for param, grad in zip(module.parameters(), local, strict=True):
        param.grad = grad.clone()
    result = optimizer.step()
    expected_norm, expected_zeros, mains = _single_process(inner)
    ours = [main for _, main in optimizer.main_params()]
    torch.testing.assert_close(ours[0], mains[0].chunk(tp)[rank], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours[1], mains[1], rtol=1e-6, atol=1e-7)
    module[2].grad = torch.full((3,), math.nan).half()
    skipped = not bool(optimizer.step().success)
    return result.grad_norm.item(), result.num_zeros_in_grad.item(), expected_norm, expected_zeros, skipped


@pytest.mark.parametrize(
    ("world", "tp", "inner"), [(2, 1, "sgd_momentum_fused"), (4, 2, "adamw_fused"), (4, 4, "sgd_momentum_fused")]
)
def test_megatrons_attributes(ranks: RankPool, world: int, tp: int, inner: str) -> None:
    """``tensor_model_parallel`` parameters add up over ranks, plain ones count once, ``shared`` copies not at all.

    A shared copy still takes part in `found_inf`.
    """
    for norm, zeros, expected_norm, expected_zeros, skipped in ranks.run(world, _megatron, inner, tp):
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        assert zeros == pytest.approx(expected_zeros)
        assert skipped


def _as_dtensor(layout: str) -> tuple[Any, list[Any]]:
    """Return a mesh and the placements of matrix and vector."""
    world = dist.get_world_size()
    if layout == "fsdp":
        return mesh_of((world,), ("dp",)), [[Shard(0)], [Shard(0)]]
    if layout == "tp":
        return mesh_of((world,), ("tp",)), [[Shard(1)], [Replicate()]]
    if layout == "replicated_first":
        return mesh_of((world,), ("tp",)), [[Replicate()], [Shard(0)]]
    if layout == "hsdp":
        mesh = mesh_of((2, world // 2), ("dp_replicate", "dp_shard"))
        return mesh, [[Replicate(), Shard(0)], [Replicate(), Shard(0)]]
    mesh = mesh_of((2, world // 2), ("dp", "tp"))
    if layout == "sub-mesh":
        return mesh["tp"], [[Shard(0)], [Replicate()]]
    return mesh, [[Shard(0), Shard(1)], [Shard(0), Replicate()]]


def _dtensor(layout: str, inner: str) -> Any:
    mesh, placements = _as_dtensor(layout)
    weights, grads = _whole()
    module = Bag(distribute_tensor(w, mesh, p) for w, p in zip(weights, placements, strict=True))
    groups = None if layout == "sub-mesh" else mesh
    optimizer = MixedPrecisionOptimizer(
        INNER[inner](module), CONFIG, ConstantGradScaler(2.0), groups=groups, grads_are_scaled=True
    )
    for param, grad, placement in zip(module.parameters(), grads, placements, strict=True):
        param.grad = distribute_tensor(grad, mesh, placement)
    result = optimizer.step()
    expected_norm, expected_zeros, mains = _single_process(inner)
    for (_, main), expected in zip(optimizer.main_params(), mains, strict=True):
        assert isinstance(main, DTensor)
        torch.testing.assert_close(main.full_tensor(), expected, rtol=1e-6, atol=1e-7)
    before = [main.to_local().clone() for _, main in optimizer.main_params() if isinstance(main, DTensor)]
    last = list(module.parameters())[0 if layout != "replicated_first" else 1].grad
    if dist.get_rank() == dist.get_world_size() - 1 and isinstance(last, DTensor):
        last.to_local().fill_(math.nan)
    skipped = not bool(optimizer.step().success)
    after = [main.to_local() for _, main in optimizer.main_params() if isinstance(main, DTensor)]
    same = all(bits_equal(a, b) for a, b in zip(before, after, strict=True))
    return result.grad_norm.item(), result.num_zeros_in_grad.item(), expected_norm, expected_zeros, skipped, same


@pytest.mark.parametrize(
    ("layout", "world", "inner"),
    [
        ("fsdp", 4, "sgd_momentum_fused"),
        ("tp", 2, "adamw_fused"),
        ("replicated_first", 2, "sgd_momentum_fused"),
        ("hsdp", 4, "adamw_fused"),
        ("two_dimensional", 4, "adamw_fused"),
        ("sub-mesh", 4, "sgd_momentum_fused"),
    ],
)
def test_dtensors(ranks: RankPool, layout: str, world: int, inner: str) -> None:
    """Sharded, replicated and 2D DTensors, and those of a sub-mesh, around which all ranks are data parallel: norm,
    zeros and update equal one process; NaN on the last rank skips all.

    A list of DTensors with a replicated one first gives torch's ranks different `found_inf`.
    """
    for norm, zeros, expected_norm, expected_zeros, skipped, same in ranks.run(world, _dtensor, layout, inner):
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        assert zeros == pytest.approx(expected_zeros)
        assert skipped
        assert same


def _partial_gradient() -> list[Any]:
    mesh = mesh_of((2,), ("tp",))
    weights, grads = _whole()
    module = Bag([distribute_tensor(weights[1], mesh, [Replicate()])])
    optimizer = MixedPrecisionOptimizer(
        INNER["sgd"](module), CONFIG, ConstantGradScaler(1.0), groups=mesh, grads_are_scaled=True
    )
    module[0].grad = DTensor.from_local(grads[1] / 2, mesh, [Partial()])
    return [optimizer.step().grad_norm.item(), grads[1].float().norm().item()]


def test_partial_gradients_are_reduced_first(ranks: RankPool) -> None:
    """The reduction of a Partial gradient (sequence-parallel norms have them) ends before anything is measured."""
    for norm, expected in ranks.run(2, _partial_gradient):
        assert norm == pytest.approx(expected, rel=1e-3)


def _dtensor_beside_plain() -> bool:
    """Train a DTensor on a mesh of this rank alone, and a plain parameter in another group. Returns whether the bits
    are those of plain parameters.
    """
    values = [value.float() for value in _whole()[0]]
    mesh = mesh_of((1,), ("dp",))
    ends = []
    for first in (distribute_tensor(values[0], mesh, [Shard(0)]), values[0].clone()):
        params = [nn.Parameter(first), nn.Parameter(values[1].clone())]
        inner = torch.optim.AdamW([{"params": [param]} for param in params], lr=1e-2)
        optimizer = MixedPrecisionOptimizer(inner, groups=ParallelGroups())
        for step in range(3):
            for param in params:
                param.grad = torch.full_like(param, float(step + 1))
            assert bool(optimizer.step().success)
        ends.append([param.full_tensor() if isinstance(param, DTensor) else param.detach() for param in params])
    return all(bits_equal(one.detach(), other) for one, other in zip(*ends, strict=True))


def test_a_mesh_of_one_rank_needs_no_group(ranks: RankPool) -> None:
    """A rank that decides alone may have DTensors that no other rank shares; plain parameters beside them step."""
    assert ranks.run(1, _dtensor_beside_plain) == [True]
