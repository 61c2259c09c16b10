"""GradScaler on many ranks: one decision for all of them, where torch's scalers let ranks part."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from megascale.amp import GradScaler
from megascale.amp.local_grads import LocalGrads
from megascale.utils.dtensors import to_local
from tests.counting import OperatorCounter
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import grad_of

Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}
ALL_REDUCE = torch.ops.c10d.allreduce_.default
NAN = float("nan")


def _scaler(kind: str) -> torch.amp.GradScaler:
    if kind == "ours":
        return GradScaler("cpu", 1024.0, process_group=dist.group.WORLD)
    return ShardedGradScaler("cpu", 1024.0, process_group=dist.group.WORLD)


def _own_param(kind: str, inner: str, poisoned: list[int]) -> tuple[float, float, int]:
    """A shard of each rank's own, as FSDP1 has it: one clean step, then one with inf on some ranks."""
    param = nn.Parameter(torch.ones(3))
    optimizer, scaler = OPTIMIZERS[inner]([param]), _scaler(kind)
    counter = OperatorCounter()
    for bad in ([], poisoned):
        param.grad = scaler.scale(torch.ones(3))
        if dist.get_rank() in bad:
            param.grad[1] = float("inf")
        with counter:
            scaler.step(optimizer)
            scaler.update()
    return round(param[0].item(), 2), scaler.get_scale(), counter.host_reads if "fused" in inner else 0


@pytest.mark.default("adamw_fused-2", "sgd-2")
@pytest.mark.parametrize(("inner", "world"), [("adamw_fused", 2), ("sgd", 2), ("adamw_foreach", 4), ("adamw_fused", 4)])
def test_ranks_of_a_process_group_skip_together(ranks: RankPool, world: int, inner: str) -> None:
    """With inf on rank 1 alone, or on all at once, all skip, and all scales back off; fused, without a host read.

    torch's ShardedGradScaler lets ranks part where the optimizer is fused: rank 0 steps on, at twice the scale.
    """
    for poisoned in ([1], list(range(world))):
        assert ranks.run(world, _own_param, "ours", inner, poisoned) == [(0.9, 512.0, 0)] * world
    assert ranks.run(world, _own_param, "ours", inner, []) == [(0.8, 1024.0, 0)] * world
    theirs = [result[:2] for result in ranks.run(world, _own_param, "torch", inner, [1])]
    agreed, parted = [(0.9, 512.0)] * world, [(0.8, 1024.0), (0.9, 512.0), *[(0.8, 1024.0)] * (world - 2)]
    assert theirs == (parted if "fused" in inner else agreed)


def _dtensor(mesh: DeviceMesh, placements: list[Placement], value: float = 1.0) -> nn.Parameter:
    """A parameter of 4 x 4, whose gradient is ``value`` all over."""
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
    param.grad = distribute_tensor(torch.full((4, 4), value), mesh, placements)
    return param


@torch.no_grad()
def _local_grad(param: nn.Parameter) -> Tensor:
    return to_local(grad_of(param))


def _grid(which: str) -> tuple[list[nn.Parameter], int]:
    """Parameters on meshes of a 2 x 2 grid, and how many all-reduces a step may take."""
    grid = mesh_of((2, 2), ("dp", "tp"))
    whole = mesh_of((4,))
    rows, columns = grid["dp"], grid["tp"]
    if which == "nested":
        sharded = [_dtensor(grid, [Shard(0), Shard(1)]), _dtensor(rows, [Shard(0)]), _dtensor(columns, [Replicate()])]
        return [_dtensor(grid, [Replicate(), Replicate()]), *sharded, _dtensor(whole, [Shard(1)])], 1
    if which == "whole":
        return [_dtensor(grid, [Replicate(), Replicate()]), _dtensor(grid, [Replicate(), Shard(0)])], 1
    if which == "crossing":
        return [_dtensor(rows, [Replicate()]), _dtensor(columns, [Shard(0)]), _dtensor(rows, [Shard(0)])], 2
    return [nn.Parameter(torch.ones(2)), _dtensor(columns, [Shard(0)])], 1  # "beside a group"


def _poison_everywhere(which: str, inner: str) -> list[tuple[Any, ...]]:
    """Poison each parameter on each rank in turn; return who found it, and how much was said and read."""
    outcomes = []
    num_params = len(_grid(which)[0])
    for where in [None, *((rank, index) for rank in range(4) for index in range(num_params))]:
        params, allowed = _grid(which)
        for param in params:
            if not isinstance(param, DTensor):
                param.grad = torch.ones(2)
        if where is not None and where[0] == dist.get_rank():
            _local_grad(params[where[1]]).fill_(NAN)
        group = dist.group.WORLD if which == "beside a group" else None
        scaler = GradScaler("cpu", 4.0, process_group=group)
        # A group each: torch's fused optimizers take no list of plain tensors and DTensors.
        optimizer = OPTIMIZERS[inner]([{"params": [param]} for param in params])
        scaler.scale(torch.ones(()))
        with OperatorCounter() as counter:
            [found] = scaler._check_inf_per_device(optimizer).values()
        assert counter.counts[ALL_REDUCE] == allowed
        assert counter.host_reads == 0, counter.host_reads
        scaler.step(optimizer)
        scaler.update()
        outcomes.append((where is not None, found.item(), scaler.get_scale()))
    return outcomes


@pytest.mark.default("whole-adamw_fused")
@pytest.mark.parametrize(
    ("which", "inner"), list(product(["whole", "nested", "crossing", "beside a group"], ["adamw_fused", "sgd"]))
)
def test_several_meshes_agree(ranks: RankPool, which: str, inner: str) -> None:
    """NaN in any parameter on any of four ranks, on meshes that nest, cross, or lie in a group: all ranks skip alike,
    also where a replicated DTensor comes first: torch's found_inf is then 1 on one rank alone.

    It takes one all-reduce where one mesh or group holds all others.
    """
    results = ranks.run(4, _poison_everywhere, which, inner)
    assert all(result == results[0] for result in results)
    assert all(found == float(poisoned) for poisoned, found, _ in results[0])
    assert all(scale == (2.0 if poisoned else 4.0) for poisoned, _, scale in results[0])


def _without_gradients(inner: str, over: str, overflow: bool) -> tuple[float, float]:
    """Two optimizers; rank 0 has gradients of the first alone, the last rank of the second alone, others of none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if over == "group":
        params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        for param in params:
            param.grad = torch.ones(2)
        group = dist.group.WORLD
    else:
        mesh = mesh_of((world,))
        params, group = [_dtensor(mesh, [Shard(0)]) for _ in range(2)], None
    if overflow and rank == world - 1:
        _local_grad(params[1]).fill_(NAN)
    for index, owner in enumerate((0, world - 1)):
        if rank != owner:
            params[index].grad = None
    pair = [OPTIMIZERS[inner]([param]) for param in params]
    scaler = GradScaler("cpu", 8.0, growth_interval=1, process_group=group)
    scaler.scale(torch.ones(()))
    for optimizer in pair:
        scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        mine = params[0 if rank == 0 else 1]
        value = to_local(mine).flatten()[0].item()
    return value, scaler.get_scale()


@pytest.mark.parametrize(
    ("world", "inner", "over"),
    [(2, "adamw_fused", "mesh"), (2, "sgd", "group"), (4, "adamw_fused", "group"), (4, "sgd", "mesh")],
)
def test_ranks_without_gradients_take_part(ranks: RankPool, world: int, inner: str, over: str) -> None:
    """A rank without gradients neither hangs nor raises, and hears of the others' overflow; so does each optimizer."""
    clean = ranks.run(world, _without_gradients, inner, over, False)
    assert [scale for _, scale in clean] == [16.0] * world
    assert [value < 1 for value, _ in clean] == [rank in (0, world - 1) for rank in range(world)]
    overflow = ranks.run(world, _without_gradients, inner, over, True)
    assert [scale for _, scale in overflow] == [4.0] * world
    assert [value < 1 for value, _ in overflow] == [rank == 0 for rank in range(world)]


def _measured() -> tuple[float, float, int]:
    """Squares of gradients on several meshes, in several placements; what the whole tensors have; all-reduces."""
    grid = mesh_of((2, 2), ("dp", "tp"))
    params = [
        _dtensor(grid, [Shard(0), Shard(1)], 2.0),
        _dtensor(grid, [Replicate(), Shard(0)], 3.0),
        _dtensor(grid, [Replicate(), Replicate()], 5.0),
        _dtensor(grid["dp"], [Shard(0)], 7.0),
        _dtensor(grid["tp"], [Replicate()], 11.0),
        nn.Parameter(torch.ones(4, 4)),
    ]
    params[-1].grad = torch.full((4, 4), 13.0)
    # A sum that is still to be made over "tp": 8.5 + 8.5.
    params.append(_dtensor(grid, [Replicate(), Replicate()]))
    params[-1].grad = DTensor.from_local(torch.full((4, 4), 8.5), grid, [Replicate(), Partial()])
    scaler, optimizer = GradScaler("cpu", 4.0), torch.optim.SGD(params, lr=1.0)
    scaler.scale(torch.ones(()))
    with OperatorCounter() as counter:
        sum_squares = scaler._measure(optimizer, LocalGrads(optimizer))
        [found_inf] = scaler._found_inf_per_device(optimizer).values()
    assert isinstance(params[-1].grad, DTensor)
    assert params[-1].grad.placements == (Replicate(), Replicate())
    assert found_inf.item() == 0.0
    return (
        sum_squares.item(),
        16.0 * sum(value**2 for value in (2, 3, 5, 7, 11, 13, 17)),
        counter.counts[ALL_REDUCE],
    )


def test_norm_of_dtensors_is_that_of_the_whole_tensors(ranks: RankPool) -> None:
    """Shards add up, replicas count once, a Partial gradient is reduced first, a plain one is this rank's alone.

    One all-reduce for the decision and the squares of the largest mesh, one for each smaller mesh.
    """
    for measured, expected, reductions in ranks.run(4, _measured):
        assert measured == expected
        assert reductions == 3
