"""Hybrid shards, expert groups, tensor-parallel duplicates and chained optimizers: one decision, each element once."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from megascale.errors import ArgumentError, ArgumentTypeError, GradientError, StateDictError, UsageError
from megascale.grad_sync import GradSync
from tests.distributed.test_distributed_optimizer import batch, config_of, flat, net, same, scaler, sharded, weights
from tests.meshes import mesh_of
from tests.pool import RankPool
from tests.training import grad_of

FP16 = torch.float16


def _hybrid(overlap: bool) -> list[Any]:
    mesh = mesh_of((2, 2), ("dp_replicate", "dp_shard"))
    groups = ParallelGroups.from_mesh(mesh)
    assert groups.data_shard is not None
    assert groups.data_replicate is not None
    module, twin = net(), net()
    ours = sharded(module, clip_grad=0.5, groups=groups, overlap_grad_reduce=overlap)
    theirs = sharded(twin, clip_grad=0.5)
    logs: list[Any] = []
    for step in range(8):
        for optimizer, network in ((ours, module), (theirs, twin)):
            optimizer.zero_grad()
            factor = math.inf if step in (2, 5) and dist.get_rank() == step % 4 else 1.0
            loss = network(batch(step, dist.get_rank(), FP16)).float().square().mean() * factor
            optimizer.scale_loss(loss).backward()
            with CommDebugMode() as mode:
                result = optimizer.step()
            row = [bool(result.success), result.num_zeros_in_grad.item(), optimizer.get_loss_scale().item()]
            logs.append((row, result.grad_norm.item(), mode.get_total_counts()))
    numels = [sum(main.numel() for _, main in optimizer.main_params()) for optimizer in (ours, theirs)]
    mine, other = flat(ours.state_dict()), flat(theirs.state_dict())
    apart = max((mine[k] - v).abs().max().item() / max(v.abs().max().item(), 1e-30) for k, v in other.items())
    buckets = len(ours.grad_sync.buckets)
    return [logs[::2], logs[1::2], numels, apart, mine, weights(module), buckets]


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hybrid_sharding(ranks: RankPool, overlap: bool) -> None:
    """2 nodes of 2: shards inside a node, copies across. Skips, zeros, norm and weights are those of 4 shards."""
    results = ranks.run(4, _hybrid, overlap)
    for ours, theirs, _, apart, state, model, _ in results:
        for (row, norm, _), (other, other_norm, _) in zip(ours, theirs, strict=True):
            assert row == other
            if row[0]:
                assert norm == pytest.approx(other_norm, rel=1e-5)
        assert [step for step, (row, _, _) in enumerate(ours) if not row[0]] == [2, 5]
        assert apart <= 2.0**-18
        assert same(state, results[0][4])
        assert same(model, results[0][5])
    held = [numels[0] for _, _, numels, *_ in results]
    total = sum(p.numel() for p in net().parameters())
    assert held[0] + held[1] == held[2] + held[3] == total
    assert sum(numels[1] for _, _, numels, *_ in results) == total


class Experts(nn.Module):
    """A dense layer, and one expert that each expert-parallel rank has for itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(4, 40)
        torch.manual_seed(seed)
        self.expert = nn.Linear(40, 5)
        for param in self.expert.parameters():
            param.allreduce = False  # type: ignore[attr-defined]


def _expert_groups() -> tuple[ParallelGroups, int]:
    """Return groups of 4 ranks: 2 experts, each on 2 ranks; and which expert is this rank's."""
    mesh = mesh_of((2, 2), ("edp", "ep"))
    groups = ParallelGroups.from_mesh(mesh, data_parallel=("edp", "ep"), expert_data_parallel="edp")
    return groups, mesh.get_local_rank("ep")


def _expert_scaler() -> DynamicGradScaler:
    return DynamicGradScaler(2.0**6, 1.0, 2.0, 0.5, 4, 1)


def _expert_optimizer(module: Experts, groups: ParallelGroups, kind: str) -> Any:
    config = OptimizerConfig(fp16=True, clip_grad=0.5, log_num_zeros_in_grad=True)
    named = list(module.named_parameters())
    if kind == "replicated":
        sync = GradSync(named, groups=groups)
        return MixedPrecisionOptimizer(
            torch.optim.AdamW(named, lr=1e-2),
            config,
            _expert_scaler(),
            groups=groups,
            grad_sync=sync,
            grads_are_scaled=True,
        )
    if kind == "sharded":
        inner = torch.optim.AdamW(named, lr=1e-2)
        return DistributedOptimizer(
            inner, config, _expert_scaler(), modules=module, groups=groups, grads_are_scaled=True
        )
    one = _expert_scaler()
    parts = [
        DistributedOptimizer(
            torch.optim.AdamW([(n, p) for n, p in named if n.startswith(name)], lr=1e-2),
            config,
            one,
            modules=module,
            groups=groups,
            grads_are_scaled=True,
        )
        for name in ("dense", "expert")
    ]
    return ChainedOptimizer(parts)


def _with_experts(kind: str) -> list[Any]:
    groups, expert = _expert_groups()
    module = Experts(seed=10 + expert).half()
    optimizer = _expert_optimizer(module, groups, kind)
    log = []
    for step in range(6):
        optimizer.zero_grad()
        # An overflow in one expert's gradients alone, on one rank alone.
        factor = math.inf if step == 2 and dist.get_rank() == 3 else 1.0
        hidden = module.dense(batch(step, dist.get_rank(), FP16))
        loss = module.expert(hidden.detach()).float().square().mean() * factor + hidden.float().square().mean()
        optimizer.scale_loss(loss).backward()
        result = optimizer.step()
        row = [bool(result.success), result.num_zeros_in_grad.item(), optimizer.get_loss_scale().item()]
        log.append((row, result.grad_norm.item()))
    return [log, flat(optimizer.state_dict()), weights(module), expert]


def _experts_by_hand() -> list[Any]:
    """Return norms and final weights of the same training written out for one process, in fp32 masters."""
    modules = [Experts(seed=10 + expert).half() for expert in range(2)]
    params = {f"dense.{n}": p for n, p in modules[0].dense.named_parameters()}
    for index, module in enumerate(modules):
        module.dense = modules[0].dense
        params |= {f"expert{index}.{n}": p for n, p in module.expert.named_parameters()}
    masters = {name: param.detach().float().requires_grad_() for name, param in params.items()}
    inner = torch.optim.AdamW(masters.values(), lr=1e-2)
    norms = []
    for step in range(6):
        if step == 2:
            norms.append(math.inf)
            continue
        total = {name: torch.zeros_like(master) for name, master in masters.items()}
        for rank in range(4):
            module = modules[rank % 2]
            hidden = module.dense(batch(step, rank, FP16))
            loss = module.expert(hidden.detach()).float().square().mean() + hidden.float().square().mean()
            names = [n for n in params if n.startswith("dense") or n.startswith(f"expert{rank % 2}")]
            grads = torch.autograd.grad(loss * 64.0, [params[n] for n in names])
            for name, grad in zip(names, grads, strict=True):
                total[name] += grad.float() / 64.0 / 4
        norm = torch.stack([grad.square().sum() for grad in total.values()]).sum().sqrt().item()
        norms.append(norm)
        for name, master in masters.items():
            master.grad = total[name] * min(1.0, 0.5 / (norm + 1e-6))
        inner.step()
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(masters[name])
    return [norms, {name: param.detach().clone() for name, param in params.items()}]


@pytest.mark.default("chained")
@pytest.mark.parametrize("kind", ["replicated", "sharded", "chained"])
def test_experts_have_a_group_of_their_own(ranks: RankPool, kind: str) -> None:
    """Experts' gradients are summed over their own group, divided by all of data parallel, counted once in the norm.

    An overflow in one expert on one rank skips everything on every rank, and there is one scale: Megatron-Core's
    ChainedOptimizer has a scaler for each part and scales the loss by the first's, so that an expert's gradients are
    wrong by a factor of 2 from then on.
    """
    norms, expected = _experts_by_hand()
    results = ranks.run(4, _with_experts, kind)
    for log, _, model, expert in results:
        assert [row for row, _ in log] == [row for row, _ in results[0][0]]
        assert [row[0] for row, _ in log] == [True, True, False, True, True, True]
        assert [row[2] for row, _ in log] == [64.0, 64.0, 32.0, 32.0, 32.0, 32.0]
        for (_, norm), exact in zip(log, norms, strict=True):
            assert norm == pytest.approx(exact, rel=1e-3) or not math.isfinite(exact)
        for name, value in model.items():
            torch.testing.assert_close(value, expected[name.replace("expert", f"expert{expert}")], rtol=2e-3, atol=2e-3)
    for first, second in ((0, 2), (1, 3)):
        assert same(results[first][1], results[second][1])


def _no_expert_group() -> str:
    module = Experts(0).half()
    with pytest.raises(ArgumentError) as caught:
        DistributedOptimizer(
            torch.optim.AdamW(module.named_parameters()),
            OptimizerConfig(fp16=True),
            _expert_scaler(),
            modules=module,
            grads_are_scaled=True,
        )
    return str(caught.value)


def test_experts_without_a_group_are_refused(ranks: RankPool) -> None:
    """An expert's parameter is never reduced over the dense ranks by default."""
    for message in ranks.run(2, _no_expert_group):
        assert "expert_data_parallel is not given" in message


def _tensor_parallel() -> list[Any]:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    groups = ParallelGroups.from_mesh(mesh)
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    whole = torch.randn(2, 100, generator=torch.Generator().manual_seed(3))
    module = nn.ParameterDict(
        {
            "split": nn.Parameter(whole[tp].half()),
            "duplicate": nn.Parameter(torch.ones(70, dtype=FP16)),
            "alike": nn.Parameter(torch.ones(5, dtype=FP16)),
        }
    )
    module["split"].tensor_model_parallel = True
    module["alike"].shared = True
    optimizer = DistributedOptimizer(
        torch.optim.SGD(module.named_parameters(), lr=0.0),
        OptimizerConfig(fp16=True, log_num_zeros_in_grad=True),
        ConstantGradScaler(4.0),
        modules=module,
        groups=groups,
        bucket_numel=64,
        grads_are_scaled=True,
    )
    generator = torch.Generator().manual_seed(5 + dp)
    values = {
        "split": torch.randn(2, 100, generator=generator).half()[tp],
        "duplicate": torch.randn(70, generator=generator).half(),
        "alike": torch.randn(5, generator=generator).half(),
    }
    values["duplicate"][:7] = 0
    loss = torch.stack([(module[name].float() * value.float()).sum() for name, value in values.items()]).sum()
    optimizer.scale_loss(loss).backward()
    result = optimizer.step()
    return [result.grad_norm.item(), result.num_zeros_in_grad.item()]


def test_tensor_parallel_duplicates_count_once(ranks: RankPool) -> None:
    """Split parameters add up over tensor-parallel ranks, duplicates count once, Megatron's shared copies never."""
    sums = [torch.zeros(2, 100, dtype=torch.float64), torch.zeros(70, dtype=torch.float64)]
    for dp in range(2):
        generator = torch.Generator().manual_seed(5 + dp)
        split = torch.randn(2, 100, generator=generator).half().double()
        duplicate = torch.randn(70, generator=generator).half().double()
        duplicate[:7] = 0
        sums = [sums[0] + split, sums[1] + duplicate]
    total = sum((one / 2).square().sum().item() for one in sums)
    for norm, zeros in ranks.run(4, _tensor_parallel):
        assert norm == pytest.approx(math.sqrt(total), rel=1e-5)
        assert zeros == 7


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
    fresh, mixed = net(seed=4), net(seed=5)
    first = sharded(fresh)
    first.load_state_dict(ours)
    second = MixedPrecisionOptimizer(
        torch.optim.AdamW(
            [
                {"params": [(n, p) for n, p in mixed.named_parameters() if p.dim() > 1]},
                {"params": [(n, p) for n, p in mixed.named_parameters() if p.dim() <= 1]},
            ]
        ),
        config_of(FP16),
        scaler(FP16),
        grads_are_scaled=True,
    )
    second.load_state_dict(ours)
    loaded = same(flat(first.state_dict()), flat(ours)) and same(flat(second.state_dict()), flat(ours))
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


def _wrap(params: list[Tensor], scale: Any, **options: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(
        torch.optim.SGD(params, lr=0.1), OptimizerConfig(fp16=True, **options), scale, grads_are_scaled=True
    )


def test_a_chain_that_could_not_step_as_one_is_refused() -> None:
    """Other scaler objects, other clipping, a shared parameter, shared names: each refused, saying what differs."""
    one, two = (nn.Parameter(torch.ones(3).half()) for _ in range(2))
    first = ConstantGradScaler(2.0)
    named = MixedPrecisionOptimizer(
        torch.optim.SGD([("b", two)], lr=0.1), OptimizerConfig(fp16=True), first, grads_are_scaled=True
    )
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ArgumentError, r"optimizers is empty"),
        ([torch.optim.SGD([one])], ArgumentTypeError, r"optimizers\[0\] must be a MixedPrecisionOptimizer"),
        ([_wrap([one], first), _wrap([two], ConstantGradScaler(2.0))], ArgumentError, r"has another grad scaler"),
        ([_wrap([one], first), _wrap([two], first, clip_grad=2.0)], ArgumentError, r"clip_grad=2.0"),
        ([_wrap([one], first), _wrap([one], first)], ArgumentError, r"hold the same parameter"),
        ([_wrap([one], first), _wrap([two], first)], ArgumentError, r"a parameter called '0'"),
    ]
    for optimizers, error, message in cases:
        with pytest.raises(error, match=message):
            ChainedOptimizer(optimizers)
    chain = ChainedOptimizer([_wrap([one], first), named])
    packed = chain.state_dict()
    packed["main_params"]["c"] = torch.ones(3)
    with pytest.raises(StateDictError, match=r"parameters that no optimizer has: 'c'"):
        chain.load_state_dict(packed)
    with pytest.raises(UsageError, match=r"add the param group to one of"):
        chain.add_param_group({"params": [two]})


def test_a_chain_serves_a_scheduler() -> None:
    """Schedulers of torch drive the live param groups of all parts."""
    one, two = (nn.Parameter(torch.ones(3).half()) for _ in range(2))
    first = ConstantGradScaler(2.0)
    parts = [
        MixedPrecisionOptimizer(
            torch.optim.SGD([(name, p)], lr=0.5), OptimizerConfig(fp16=True), first, grads_are_scaled=True
        )
        for name, p in (("a", one), ("b", two))
    ]
    chain = ChainedOptimizer(parts)
    schedule = torch.optim.lr_scheduler.ExponentialLR(chain, 0.5)
    (one.sum() + two.sum()).float().backward()
    assert grad_of(one).numel() == 3
    chain.step()
    schedule.step()
    assert [group["lr"] for part in parts for group in part.param_groups] == [0.25, 0.25]


BAD_GROUPS = [
    (lambda a, b, c: ParallelGroups(a, data_replicate=b), r"data_replicate is given without data_shard"),
    (lambda a, b, c: ParallelGroups(a, data_shard=b), r"must together make up data_parallel \(4 ranks\)"),
    (lambda a, b, c: ParallelGroups(b, data_shard=a), r"data_shard \(4 ranks\) and data_replicate \(1 ranks\)"),
]


def _bad_groups() -> list[str]:
    mesh = mesh_of((2, 2), ("a", "b"))
    messages = []
    for make, pattern in BAD_GROUPS:
        with pytest.raises(ArgumentError, match=pattern) as caught:
            make(dist.group.WORLD, mesh.get_group("a"), mesh.get_group("b"))
        messages.append(str(caught.value))
    return messages


def test_groups_that_do_not_fit_are_refused(ranks: RankPool) -> None:
    """Shard and replicate groups must make up data_parallel."""
    assert len(ranks.run(4, _bad_groups)[0]) == len(BAD_GROUPS)
