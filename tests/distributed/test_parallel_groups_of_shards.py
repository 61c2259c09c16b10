"""Hybrid shards, expert groups, tensor-parallel duplicates and chained optimizers: one decision, each element once."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
)
from megascale.errors import GradientError
from megascale.grad_sync import GradSync
from tests.distributed.test_distributed_optimizer import batch, config_of, flat, net, same, scaler, sharded, weights
from tests.meshes import mesh_of
from tests.pool import RankPool

FP16 = torch.float16


def _expert_optimizer(module: nn.Module, groups: ParallelGroups, kind: str) -> Any:
    config = OptimizerConfig(fp16=True, clip_grad=0.5)
    scaler = DynamicGradScaler(2.0**6, 1.0, 2.0, 0.5, 4, 1)
    named = list(module.named_parameters())
    if kind == "replicated":
        sync = GradSync(named, groups=groups)
        return MixedPrecisionOptimizer(torch.optim.SGD(named, lr=1.0), config, scaler, groups=groups, grad_sync=sync)
    parts = [
        DistributedOptimizer(torch.optim.SGD(part, lr=1.0), config, scaler, modules=module, groups=groups)
        for part in ([named] if kind == "sharded" else [named[:1], named[1:]])
    ]
    return parts[0] if kind == "sharded" else ChainedOptimizer(parts)


def _with_experts(kind: str) -> list[Any]:
    """Train two experts, each on two of four ranks, in whose loss rank r multiplies every weight by r + 1."""
    mesh, rank = mesh_of((2, 2), ("edp", "ep")), dist.get_rank()
    groups = ParallelGroups.from_mesh(mesh, data_parallel=("edp", "ep"), expert_data_parallel="edp")
    module = nn.ParameterDict(
        {"dense": nn.Parameter(torch.ones(40).half()), "expert": nn.Parameter(torch.ones(5).half())}
    )
    module["expert"].allreduce = False
    optimizer, log = _expert_optimizer(module, groups, kind), []
    for step in range(3):
        optimizer.zero_grad()
        # An overflow in one expert's gradients alone, on one rank alone.
        factor = math.inf if step == 1 and rank == 3 else 1.0
        loss = (module["dense"].float().sum() + module["expert"].float().sum() * factor) * (rank + 1)
        optimizer.scale_loss(loss).backward()
        success, norm, _ = optimizer.step()
        log.append((bool(success), norm.item(), optimizer.get_loss_scale().item()))
    mains = optimizer.state_dict()["main_params"]
    return [log, *(mains[name].unique().tolist() for name in ("dense", "expert")), mesh.get_local_rank("ep")]


@pytest.mark.default("chained")
@pytest.mark.parametrize("kind", ["replicated", "sharded", "chained"])
def test_experts_have_a_group_of_their_own(ranks: RankPool, kind: str) -> None:
    """Experts' gradients are summed over their own group, divided by all of data parallel, counted once in the norm.

    An overflow in one expert on one rank skips everything on every rank, and there is one scale: Megatron-Core's
    ChainedOptimizer has a scaler for each part and scales the loss by the first's, so that an expert's gradients are
    wrong by a factor of 2 from then on.
    """
    of_dense, of_expert = (1 + 2 + 3 + 4) / 4, [(1 + 3) / 4, (2 + 4) / 4]
    norm = math.sqrt(40 * of_dense**2 + sum(5 * grad**2 for grad in of_expert))
    for log, dense, mine, expert in ranks.run(4, _with_experts, kind):
        assert [(landed, scale) for landed, _, scale in log] == [(True, 64.0), (False, 32.0), (True, 32.0)]
        assert [log[0][1], log[2][1]] == pytest.approx([norm] * 2, rel=1e-6)
        assert dense == pytest.approx([1 - 2 * of_dense * 0.5 / norm], rel=1e-5)
        assert mine == pytest.approx([1 - 2 * of_expert[expert] * 0.5 / norm], rel=1e-5)


def _tensor_parallel() -> list[float]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    rank, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    sizes = {"split": 100, "duplicate": 70, "alike": 5}
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(size, dtype=FP16)) for name, size in sizes.items()})
    module["split"].tensor_model_parallel = True
    module["alike"].shared = True
    optimizer = DistributedOptimizer(
        torch.optim.SGD(module.named_parameters(), lr=0.0),
        OptimizerConfig(fp16=True, log_num_zeros_in_grad=True),
        ConstantGradScaler(4.0),
        modules=module,
        groups=ParallelGroups.from_mesh(mesh),
        bucket_numel=64,
    )
    split, duplicate, alike = (module[name].float() for name in sizes)
    loss = split.sum() * (1 + rank) * (1 + tp) + duplicate[7:].sum() * (3 + rank) + alike.sum()
    optimizer.scale_loss(loss).backward()
    result = optimizer.step()
    return [result.grad_norm.item(), result.num_zeros_in_grad.item()]


def test_tensor_parallel_duplicates_count_once(ranks: RankPool) -> None:
    """Split parameters add up over tensor-parallel ranks, duplicates count once, Megatron's shared copies never."""
    squares = 100 * (1.5**2 + 3.0**2) + (70 - 7) * 3.5**2
    for found in ranks.run(4, _tensor_parallel):
        assert found == pytest.approx([math.sqrt(squares), 7], rel=1e-5)


def _whole_experts(split: bool) -> list[float]:
    """Return the norms of 2 ranks that split or repeat a dense parameter, and have an expert each, which is whole."""
    mesh = mesh_of((1, 2), ("dp", "tp"))
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(1, dtype=FP16)) for name in ("dense", "expert")})
    module["dense"].tensor_model_parallel = split
    module["expert"].allreduce = False
    groups = ParallelGroups.from_mesh(mesh, expert_data_parallel=(), expert_tensor_parallel=())
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(module.named_parameters(), lr=0.0),
        OptimizerConfig(fp16=True),
        ConstantGradScaler(4.0),
        groups=groups,
        grads_are_scaled=True,
    )
    module["dense"].grad = torch.full((1,), 4.0 * 3, dtype=FP16)
    module["expert"].grad = torch.full((1,), 4.0 * (5 + mesh.get_local_rank("tp")), dtype=FP16)
    return [optimizer.step().grad_norm.item()]


@pytest.mark.parametrize("split", [True, False])
def test_experts_need_not_be_split_as_dense_parameters_are(ranks: RankPool, split: bool) -> None:
    """Experts that tensor-parallel ranks hold whole, one each, count in full (Megatron's ETP of 1)."""
    dense = 2 * 3**2 if split else 3**2
    for [norm] in ranks.run(2, _whole_experts, split):
        assert norm == pytest.approx(math.sqrt(dense + 5**2 + 6**2), rel=1e-6)


def _chain_like_one() -> list[Any]:
    one, many = net(), net()
    single = sharded(one, clip_grad=0.5)
    shared_scaler = scaler(FP16)
    named = list(many.named_parameters())
    matrices = torch.optim.AdamW([(n, p) for n, p in named if p.dim() > 1], lr=1e-2, weight_decay=0.1)
    rest = torch.optim.AdamW([(n, p) for n, p in named if p.dim() <= 1], lr=3e-3, weight_decay=0.0)
    chain = ChainedOptimizer(
        [
            DistributedOptimizer(
                inner,
                config_of(FP16, 0.5),
                shared_scaler,
                modules=many,
                bucket_numel=300,
                grads_are_scaled=True,
            )
            for inner in (matrices, rest)
        ]
    )
    log = []
    for step in range(8):
        for optimizer, module in ((single, one), (chain, many)):
            optimizer.zero_grad()
            factor = math.nan if step == 3 and dist.get_rank() == 1 else 1.0
            loss = module(batch(step, dist.get_rank(), FP16)).float().square().mean() * factor
            optimizer.scale_loss(loss).backward()
            with CommDebugMode() as mode:
                result = optimizer.step()
            log.append((bool(result.success), result.num_zeros_in_grad.item(), optimizer.get_loss_scale().item()))
            small = [n for op, n in mode.get_comm_counts().items() if "all_reduce" in str(op) or "allreduce" in str(op)]
            assert small == [1]
    ours, theirs = chain.state_dict(), single.state_dict()
    assert ours["optimizer"]["param_groups"][0]["params"] == theirs["optimizer"]["param_groups"][0]["params"]
    equal = same(flat(ours), flat(theirs))
    fresh = sharded(net(seed=4))
    fresh.load_state_dict(ours)
    loaded = same(flat(fresh.state_dict()), flat(ours))
    chain.load_state_dict(theirs)
    before = flat(chain.state_dict())
    broken = single.state_dict()
    broken["main_params"]["head.bias"] = torch.full((1,), 1e6)
    with pytest.raises(Exception, match=r"main param of 'head.bias' holds values of 65520 or more"):
        chain.load_state_dict(broken)
    return [log[::2], log[1::2], equal, loaded, same(before, flat(chain.state_dict()))]


def test_a_chain_steps_like_one_optimizer(ranks: RankPool) -> None:
    """Two optimizers in a chain: one all-reduce, one scale, the same bits as one optimizer with two groups.

    Its state dict is that of one optimizer, and a load that one part refuses changes none.
    """
    for single, chain, equal, loaded, unchanged in ranks.run(2, _chain_like_one):
        assert single == chain
        assert [row[0] for row in chain].count(False) == 1
        assert (equal, loaded, unchanged) == (True, True, True)


def _fault_in_one_part() -> list[str]:
    one, two = nn.Embedding(4, 3).half(), nn.Embedding(4, 3, sparse=dist.get_rank() == 1).half()
    first = ConstantGradScaler(2.0)
    parts = [
        MixedPrecisionOptimizer(
            torch.optim.SGD([(name, m.weight)], lr=0.1), OptimizerConfig(fp16=True), first, grads_are_scaled=True
        )
        for name, m in (("one", one), ("two", two))
    ]
    chain = ChainedOptimizer(parts)
    before = [weights(one), weights(two)]
    (one(torch.tensor([1])).float().sum() + two(torch.tensor([1])).float().sum()).backward()
    with pytest.raises(GradientError) as caught:
        chain.step()
    assert same(before[0], weights(one))
    assert same(before[1], weights(two))
    return [str(caught.value)]


def test_a_fault_in_one_part_is_heard_by_all(ranks: RankPool) -> None:
    """Invariant 7: what the second optimizer cannot use on one rank raises the same error on every rank."""
    for [message] in ranks.run(2, _fault_in_one_part):
        assert "rank 1: the gradient of 'two' has layout torch.sparse_coo" in message
