"""One decision on every rank: poison anywhere, groups of every kind, errors on all ranks alike."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from megascale import ConstantGradScaler, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, ParallelGroups
from megascale.errors import ArgumentError, GradientError, MainParamOverflowError
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import INNER, Bag, Tiny, bits_equal, constant, grad_of, model, same_bits, set_grads, snapshot, wrap


def _poison_every_rank_in_turn(inner: str, poison: float) -> list[Any]:
    module = model()
    optimizer = wrap(module, INNER[inner], clip_grad=1.0)
    scales = []
    for bad_rank in range(dist.get_world_size()):
        for name in ("first.weight", "norm.bias", "head.weight"):
            set_grads(module, seed=7)
            assert bool(optimizer.step().success)
            before = snapshot(optimizer, module)
            set_grads(module, seed=8)
            if dist.get_rank() == bad_rank:
                grad_of(dict(module.named_parameters())[name]).view(-1)[-1] = poison
            assert not bool(optimizer.step().success)
            assert same_bits(before, snapshot(optimizer, module))
            scales.append(optimizer.state_dict()["grad_scaler"])
    return [scales, snapshot(optimizer, module), optimizer.num_skipped_steps.item()]


@pytest.mark.default("1-adamw_fused-inf", "4-adamw_foreach-nan")
@pytest.mark.parametrize(
    ("world", "inner", "poison"),
    [
        (1, "adamw_fused", math.inf),
        (2, "sgd_momentum_fused", math.nan),
        (2, "adamw_foreach", math.inf),
        (4, "adamw_foreach", math.nan),
        (4, "adamw_fused", -math.inf),
    ],
)
def test_poison_on_any_rank_skips_all(ranks: RankPool, world: int, inner: str, poison: float) -> None:
    """Invariants 1 and 2: one bad element on one rank, each rank and several tensors in turn: all skip, no bit changes.

    torch's ShardedGradScaler with a fused optimizer lets the ranks diverge here.
    """
    results = ranks.run(world, _poison_every_rank_in_turn, inner, poison)
    first_scales, first_state, _ = results[0]
    for scales, state, skipped in results:
        assert scales == first_scales
        assert same_bits(state, first_state)
        assert skipped == 3 * world


def _collectives(num_tensors: int, count_zeros: bool) -> tuple[int, int]:
    module = Bag(torch.ones(3, dtype=torch.float16) for _ in range(num_tensors))
    optimizer = wrap(module, clip_grad=1.0, log_num_zeros_in_grad=count_zeros)
    set_grads(module, 0)
    optimizer.step()
    with CommDebugMode() as mode:
        optimizer.step()
    return mode.get_total_counts(), int(optimizer.num_skipped_steps)


@pytest.mark.default("False")
@pytest.mark.parametrize("count_zeros", [False, True])
def test_one_collective_for_any_number_of_tensors(ranks: RankPool, count_zeros: bool) -> None:
    """Invariant 8: one all-reduce a step, for 10 and for 1,000 tensors, with clipping and zero count."""
    for num_tensors in (10, 1000):
        assert ranks.run(2, _collectives, num_tensors, count_zeros) == [(1, 0), (1, 0)]


def _rank_without_gradients() -> list[Any]:
    module = model()
    scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 4, 1)
    inner = INNER["adamw_fused"](module)
    optimizer = MixedPrecisionOptimizer(inner, None, scaler, grads_are_scaled=True, replicas_may_differ=True)
    outcome = []
    for step in range(4):
        optimizer.zero_grad()
        if dist.get_rank() != step % dist.get_world_size():
            set_grads(module, seed=step)
            if step == 2:
                grad_of(module.first.bias)[0] = math.inf
        outcome.append(bool(optimizer.step().success))
    state = optimizer.state_dict()
    keys = {name: sorted(entry) for name, entry in state["optimizer"]["state"].items()}
    return [outcome, state["grad_scaler"], keys]


@pytest.mark.parametrize("world", [2, 4])
def test_rank_without_gradients_takes_part(ranks: RankPool, world: int) -> None:
    """A rank without any gradient joins the agreement, skips with the others, and has the same state keys."""
    results = ranks.run(world, _rank_without_gradients)
    assert all(result == results[0] for result in results)
    assert results[0][0] == [True, True, False, True]


def _ddp_training(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    module = Tiny().to(dtype)
    ddp = DistributedDataParallel(module)
    optimizer = wrap(module, INNER["adamw_fused"], scale=2.0**8, clip_grad=0.5)
    for step in range(8):
        optimizer.zero_grad()
        data = torch.randn(4, 4, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
        loss = ddp(data.to(dtype)).float().square().mean()
        if step == 5 and dist.get_rank() == 0:
            loss = loss * math.inf
        optimizer.scale_loss(loss).backward()
        optimizer.step()
    return snapshot(optimizer, module), optimizer.state_dict()["grad_scaler"], optimizer.num_skipped_steps.item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ranks_stay_bitwise_equal_under_ddp(ranks: RankPool, dtype: torch.dtype) -> None:
    """Invariant 1: real backward passes under DDP, one overflow: params, state and scaler are the same on every
    rank.
    """
    results = ranks.run(4, _ddp_training, dtype)
    assert all(same_bits(result[0], results[0][0]) for result in results)
    assert all(result[1:] == results[0][1:] for result in results)
    assert results[0][2] == 1


def _groups_of_every_kind() -> list[list[int | None]]:
    world, mesh = dist.group.WORLD, mesh_of((dist.get_world_size(),))
    named = mesh_of((2, 2), ("dp", "tp"))
    hybrid = mesh_of((2, 2), ("dp_replicate", "dp_shard"))
    odd = mesh_of((2, 2), ("rows", "columns"))
    made = [
        ParallelGroups.of(None),
        ParallelGroups.of(world),
        ParallelGroups.of(mesh),
        ParallelGroups.of(named),
        ParallelGroups.of(hybrid),
        ParallelGroups.from_mesh(odd, data_parallel="rows", tensor_parallel=["columns"]),
        ParallelGroups(),
        ParallelGroups(data_parallel=world, grad_stats=None),
        ParallelGroups(tensor_parallel=world),
        ParallelGroups.from_mesh(hybrid, data_parallel="dp_shard"),
        ParallelGroups.from_mesh(odd, data_parallel=["rows", "columns"], data_replicate="columns"),
        ParallelGroups.from_mesh(hybrid, data_parallel="dp_replicate"),
    ]
    fields = (
        "data_parallel",
        "grad_stats",
        "tensor_parallel",
        "data_shard",
        "data_replicate",
        "expert_tensor_parallel",
    )
    return [[None if (g := getattr(groups, field)) is None else g.size() for field in fields] for groups in made]


def test_groups_resolve(ranks: RankPool) -> None:
    """ParallelGroups from nothing, a ProcessGroup or a DeviceMesh; a field None is this rank alone."""
    expected = [
        [4, 4, None, 4, None, None],
        [4, 4, None, 4, None, None],
        [4, 4, None, 4, None, None],
        [2, 4, 2, 2, None, 2],
        [4, 4, None, 2, 2, None],
        [2, 4, 2, 2, None, 2],
        [None, None, None, None, None, None],
        [4, None, None, 4, None, None],
        [None, 4, 4, None, None, 4],
        [2, 4, None, 2, None, None],
        [4, 4, None, 2, 2, None],
        [2, 4, None, 2, None, None],
    ]
    assert ranks.run(4, _groups_of_every_kind) == [expected] * 4


def _refused_groups() -> None:
    pair = mesh_of((2, 2), ("dp", "tp"))
    data, tensor, world = pair.get_group("dp"), pair.get_group("tp"), dist.group.WORLD
    expert = nn.Parameter(torch.ones(1))
    expert.allreduce = False  # type: ignore[attr-defined]
    calls: list[tuple[Any, str]] = [
        (lambda: ParallelGroups(data, tensor_parallel=tensor), "^grad_stats is not given, and data_parallel and"),
        (lambda: ParallelGroups.of(init_device_mesh("cpu", (2, 2))), "mesh has 2 dimensions without names"),
        (
            lambda: ParallelGroups.from_mesh(pair, data_parallel="data"),
            "^data_parallel names the mesh dimension 'data'",
        ),
        (lambda: ParallelGroups(data_parallel=3), "^data_parallel must be a ProcessGroup that this rank belongs to"),  # type: ignore[arg-type]
        (lambda: ParallelGroups.from_mesh(pair, data_replicate="tp"), r"^data_shard \(2 ranks\) and data_replicate \("),
        (lambda: ParallelGroups(data, data_shard=tensor), r"^data_shard \(2 ranks\) and data_replicate \("),
        (lambda: ParallelGroups(world, data_shard=tensor), r"must together make up data_parallel \(4 ranks\)"),
        (lambda: ParallelGroups(world, data_replicate=tensor), "data_replicate is given without data_shard"),
        (
            lambda: ParallelGroups.from_mesh(pair).of_param(expert),
            "^expert_data_parallel is not given, but a parameter",
        ),
    ]
    for call, message in calls:
        with pytest.raises(ArgumentError, match=message):
            call()


def test_bad_groups_are_refused_by_name(ranks: RankPool) -> None:
    """Groups that cannot be meant get an error with the remedy."""
    ranks.run(4, _refused_groups)


def test_a_field_that_is_not_given_is_no_none() -> None:
    """None is this rank alone."""
    assert "expert_data_parallel=unset" in repr(ParallelGroups())


def _alone_among_many() -> list[bool]:
    module = model()
    config = OptimizerConfig(fp16=True)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        config,
        ConstantGradScaler(1.0),
        groups=ParallelGroups(),
        grads_are_scaled=True,
    )
    set_grads(module, 0)
    if dist.get_rank() == 1:
        grad_of(module.first.bias)[0] = math.nan
    with CommDebugMode() as mode:
        success = bool(optimizer.step().success)
    return [success, mode.get_total_counts() == 0]


def test_groups_of_none_decide_alone(ranks: RankPool) -> None:
    """ParallelGroups() is this rank alone: no communication, a decision of its own."""
    assert ranks.run(2, _alone_among_many) == [[True, True], [False, True]]


def _sparse_on_one_rank() -> list[Any]:
    module = nn.Embedding(6, 2).half()
    optimizer = constant(module, INNER["adamw_fused"], 4.0)
    before = snapshot(optimizer, module)
    module.weight.grad = torch.ones(6, 2).half()
    if dist.get_rank() == 1:
        module.weight.grad = module.weight.grad.to_sparse()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    unchanged = same_bits(before, snapshot(optimizer, module))
    module.weight.grad = torch.ones(6, 2).half()
    return [str(caught.value), unchanged, bool(optimizer.step().success)]


def test_unusable_gradient_raises_on_every_rank(ranks: RankPool) -> None:
    """Invariant 7: a sparse gradient on one rank raises one named error on all, changes nothing, and training can go
    on.
    """
    results = ranks.run(2, _sparse_on_one_rank)
    for message, unchanged, went_on in results:
        assert message.startswith("rank 1: the gradient of 'weight' has layout torch.sparse_coo")
        assert unchanged
        assert went_on


def _outgrown_on_rank_1() -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """Return what has taken a step after which a main param of one rank does not fit fp16."""
    module = model()
    inner = INNER["sgd"](module)
    optimizer = MixedPrecisionOptimizer(inner, None, ConstantGradScaler(1.0), replicas_may_differ=True)
    optimizer.param_groups[0]["lr"] = 70000.0
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    if dist.get_rank() == 1:
        grad_of(module.second.bias)[0] = 1.0
    return module, optimizer


def _overflow_on_one_rank() -> list[Any]:
    module, optimizer = _outgrown_on_rank_1()
    good = optimizer.state_dict()
    optimizer.step()
    with pytest.raises(MainParamOverflowError) as caught:
        optimizer.step()
    optimizer.step()  # the rounding has not been mended: a load is the way out
    optimizer.load_state_dict(good)
    optimizer.zero_grad()
    went_on = bool(optimizer.step().success)
    if dist.get_rank() == 0:
        module.get_parameter("first.weight").grad = torch.ones(6, 4).half().to_sparse()
    with pytest.raises(GradientError) as other:
        optimizer.step()
    return [str(caught.value), went_on, str(other.value)]


def test_outgrown_main_param_raises_on_every_rank(ranks: RankPool) -> None:
    """Invariant 7: a main param that outgrew fp16 on one rank (of a sharded model) is named on all, at the next
    step. A load makes it good, and it is not named again beside another error.
    """
    for message, went_on, other in ranks.run(2, _overflow_on_one_rank):
        assert message.startswith("rank 1: main param of 'second.bias' is 65520 or more")
        assert went_on
        assert other.startswith("rank 0: the gradient of 'first.weight' has layout torch.sparse_coo")
        assert "failed" not in other


def _overflow_and_sparse_gradient() -> list[Any]:
    module, optimizer = _outgrown_on_rank_1()
    optimizer.step()
    before = module.get_parameter("first.weight").detach().clone()
    module.get_parameter("first.weight").grad = torch.ones(6, 4).half()
    if dist.get_rank() == 1:
        module.get_parameter("second.weight").grad = torch.ones(4, 6).half().to_sparse()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    return [str(caught.value), bits_equal(before, module.get_parameter("first.weight").detach())]


def test_two_errors_of_one_rank_are_an_error(ranks: RankPool) -> None:
    """Invariant 7: a main param that outgrew fp16 in one step, and a gradient that the next one cannot use."""
    for message, unchanged in ranks.run(2, _overflow_and_sparse_gradient):
        assert message.startswith("rank 1: the gradient of 'second.weight' has layout torch.sparse_coo")
        assert unchanged
