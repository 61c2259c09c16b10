"""Ranks that reduce gradients together and were built differently: one error on all of them, nothing left behind."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from megascale import DistributedOptimizer, MixedPrecisionOptimizer, ParallelGroups
from megascale.errors import ArgumentError
from megascale.grad_sync import GradSync
from megascale.main_params.replica_check import require_same
from megascale.utils.collectives import raise_together
from tests.distributed.test_distributed_optimizer import Net, batch, net, same, weights
from tests.meshes import hybrid_groups
from tests.pool import RankPool

FP32, BF16 = torch.float32, torch.bfloat16

Options = dict[str, Any]


def _inner(module: nn.Module, *, reverse: bool = False, in_second_group: int = 0) -> torch.optim.Optimizer:
    named = list(module.named_parameters())
    if in_second_group:
        first: Options = {"params": named[:-in_second_group]}
        second: Options = {"params": named[-in_second_group:], "weight_decay": 0.0}
        return torch.optim.AdamW([first, second], lr=1e-2)
    return torch.optim.AdamW(named[::-1] if reverse else named, lr=1e-2)


def _build(module: Net, kind: str, options: Options) -> MixedPrecisionOptimizer:
    ordered = {name: options.pop(name) for name in ("reverse", "in_second_group") if name in options}
    inner = _inner(module, **ordered)
    if kind == "DistributedOptimizer":
        return DistributedOptimizer(inner, modules=module, **options)
    named = list(module.named_parameters())
    synced = named[::-1] if options.pop("sync_reverse", False) else named
    return MixedPrecisionOptimizer(inner, groups=options.get("groups"), grad_sync=GradSync(synced, **options))


def _step(module: Net, optimizer: MixedPrecisionOptimizer) -> bool:
    loss = module(batch(0, dist.get_rank(), BF16)).float().square().mean()
    optimizer.scale_loss(loss).backward()
    return bool(optimizer.step().success)


def _hooks(module: nn.Module) -> int:
    on_params = sum(len(param._post_accumulate_grad_hooks or ()) for param in module.parameters())
    return on_params + sum(len(part._forward_pre_hooks) for part in module.modules())


def _begun_apart(kinds: list[str], options: list[Options], change: str = "") -> list[Any]:
    """Build each rank's own, then the same on every rank, of the same module, and take a step.

    ``change``: what the last rank alone does to its module before.
    """
    module, last = net(BF16), dist.get_rank() == dist.get_world_size() - 1
    kept = module
    if last and change:
        _change(module, change)
    before = [param.data_ptr() for param in module.parameters()]
    with pytest.raises(ArgumentError) as caught:
        _build(module, kinds[dist.get_rank()], dict(options[dist.get_rank()]))
    untouched = _hooks(module) == 0 and [param.data_ptr() for param in module.parameters()] == before
    if change:
        kept = net(BF16)
    optimizer = _build(kept, kinds[0], {"bucket_numel": 300})
    landed = _step(kept, optimizer)
    return [type(caught.value).__name__, str(caught.value), untouched, landed, weights(kept)]


def _change(module: Net, change: str) -> None:
    if change == "frozen":
        module.second.bias.requires_grad_(False)
    elif change == "dtype":
        module.second.float()
    elif change == "shape":
        module.second = nn.Linear(37, 12).to(BF16)


def _told(results: list[list[Any]]) -> str:
    """Return the one error of all ranks, after which they go on alike."""
    for kind, message, untouched, landed, model in results:
        assert kind == "ArgumentError"
        assert message == results[0][1]
        assert "build it alike on every rank: the same class and arguments" in message
        assert untouched
        assert landed
        assert same(model, results[0][4])
    told: str = results[0][1]
    return told


ARGUMENTS: list[tuple[str, str, Any, str, str]] = [
    ("DistributedOptimizer", "bucket_numel", 10, "40000000", "10"),
    ("DistributedOptimizer", "shard", "parameters", "'elements'", "'parameters'"),
    ("DistributedOptimizer", "grad_dtype", BF16, "torch.float32", "torch.bfloat16"),
    ("DistributedOptimizer", "reduce_dtype", BF16, "None", "torch.bfloat16"),
    ("DistributedOptimizer", "reduction", "sum", "'mean'", "'sum'"),
    ("DistributedOptimizer", "overlap_grad_reduce", False, "True", "False"),
    ("DistributedOptimizer", "overlap_param_gather", True, "False", "True"),
    ("DistributedOptimizer", "broadcast_params", True, "False", "True"),
    ("GradSync", "bucket_numel", 10, "40000000", "10"),
    ("GradSync", "grad_dtype", BF16, "torch.float32", "torch.bfloat16"),
    ("GradSync", "reduce_dtype", BF16, "None", "torch.bfloat16"),
    ("GradSync", "reduction", "sum", "'mean'", "'sum'"),
    ("GradSync", "overlap", False, "True", "False"),
]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("kind", "argument", "value", "usual", "other"), ARGUMENTS)
def test_argument_of_one_rank_alone_is_named_on_all(
    ranks: RankPool, kind: str, argument: str, value: Any, usual: str, other: str, odd: int
) -> None:
    """Every argument that decides about messages is compared: named with two ranks' values, nothing stays behind."""
    options: list[Options] = [{}, {}]
    options[odd] = {argument: value}
    told = _told(ranks.run(2, _begun_apart, [kind] * 2, options))
    values = (other, usual) if odd == 0 else (usual, other)
    assert told.startswith(f"{argument} is {values[0]} on rank 0 and {values[1]} on rank 1, but ranks that reduce")


@pytest.mark.default("2", "1")
@pytest.mark.parametrize("odd", [1, 2, 3])
def test_one_rank_of_four_is_named(ranks: RankPool, odd: int) -> None:
    """Among four ranks the one that differs is found, and the error is the same on all."""
    options: list[Options] = [{"bucket_numel": 300} for _ in range(4)]
    options[odd] = {"bucket_numel": 301}
    told = _told(ranks.run(4, _begun_apart, ["DistributedOptimizer"] * 4, options))
    assert told.startswith(f"bucket_numel is 300 on rank 0 and 301 on rank {odd}, ")


@pytest.mark.parametrize("kinds", [["DistributedOptimizer", "GradSync"], ["GradSync", "DistributedOptimizer"]])
def test_other_kind_of_object_is_named(ranks: RankPool, kinds: list[str]) -> None:
    """A DistributedOptimizer on one rank and a GradSync on the other: what both exchange has one form."""
    told = _told(ranks.run(2, _begun_apart, kinds, [{}, {}]))
    assert told.startswith(f"the object that reduces gradients is a {kinds[0]} on rank 0 and a {kinds[1]} on rank 1, ")


@pytest.mark.parametrize("options", [{}, {"broadcast_params": True}])
def test_other_kind_of_object_is_named_whatever_its_values(ranks: RankPool, options: Options) -> None:
    """broadcast_params lets values differ, not the kind of object."""
    told = _told(ranks.run(2, _begun_apart, ["DistributedOptimizer", "GradSync"], [options, {}]))
    assert told.startswith("the object that reduces gradients is a DistributedOptimizer on rank 0 and a GradSync on ")


CHANGES = [
    ("frozen", "5", "'second.bias' (torch.bfloat16, shape (11,)", "'third.weight' (torch.bfloat16, shape (11, 11)"),
    ("dtype", "4", "'second.weight' (torch.bfloat16, shape (11, 37)", "'second.weight' (torch.float32, shape (11, 37)"),
    (
        "shape",
        "4",
        "'second.weight' (torch.bfloat16, shape (11, 37)",
        "'second.weight' (torch.bfloat16, shape (12, 37)",
    ),
]


@pytest.mark.parametrize(("kind", "listing"), [("DistributedOptimizer", "modules"), ("GradSync", "the optimizer")])
@pytest.mark.parametrize(("change", "index", "usual", "other"), CHANGES)
def test_other_parameters_are_named(
    ranks: RankPool, kind: str, listing: str, change: str, index: str, usual: str, other: str
) -> None:
    """Names, dtypes, shapes of parameters, and whether they are trained, decide about messages."""
    told = _told(ranks.run(2, _begun_apart, [kind] * 2, [{}, {}], change))
    first, second = told.split(" on rank 0 and ")
    assert first.startswith(f"parameter {index} of {listing} is {usual}, cpu")
    assert second.startswith(f"{other}, cpu")


@pytest.mark.default("DistributedOptimizer-shared0-0", "GradSync-shared2-1", "DistributedOptimizer-shared1-1")
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("kind", "shared"),
    [("DistributedOptimizer", {}), ("DistributedOptimizer", {"broadcast_params": True}), ("GradSync", {})],
)
def test_other_order_of_parameters_is_named(ranks: RankPool, kind: str, shared: Options, odd: int) -> None:
    """The optimizer's order is that of broadcasts, and of state dicts."""
    options = [dict(shared), dict(shared)]
    options[odd]["reverse"] = True
    told = _told(ranks.run(2, _begun_apart, [kind] * 2, options))
    assert told.startswith("parameter 0 of the optimizer is ")
    names = ("'head.bias'", "'first.weight'") if odd == 0 else ("'first.weight'", "'head.bias'")
    assert f"is {names[0]} (torch.bfloat16, shape " in told
    assert f"on rank 0 and {names[1]} (torch.bfloat16, shape " in told


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("kind", "listing"), [("DistributedOptimizer", "modules"), ("GradSync", "the optimizer")])
def test_other_param_group_is_named(ranks: RankPool, kind: str, listing: str, odd: int) -> None:
    """Of which group's options a parameter takes, ranks that share it must be told alike."""
    options: list[Options] = [{"in_second_group": 1}, {"in_second_group": 1}]
    options[odd] = {"in_second_group": 2}
    told = _told(ranks.run(2, _begun_apart, [kind] * 2, options))
    at = "'head.weight' (torch.bfloat16, shape (1, 11), cpu, param group"
    first, second = (f"{at} {group})" for group in ("01" if odd else "10"))
    assert told.startswith(f"parameter 8 of {listing} is {first} on rank 0 and {second} on rank 1, but ranks")


@pytest.mark.parametrize("odd", [0, 1])
def test_other_order_in_grad_sync_is_named(ranks: RankPool, odd: int) -> None:
    """The order of GradSync's parameters is that of their buckets, whatever the optimizer's."""
    options: list[Options] = [{}, {}]
    options[odd] = {"sync_reverse": True}
    told = _told(ranks.run(2, _begun_apart, ["GradSync"] * 2, options))
    assert told.startswith("parameter 0 of the GradSync's buckets is ")


def _sharded_otherwise(odd: int) -> list[str]:
    groups = hybrid_groups()
    if dist.get_rank() != odd:
        groups = ParallelGroups(data_parallel=dist.group.WORLD)
    messages = []
    for kind in ("DistributedOptimizer", "GradSync"):
        with pytest.raises(ArgumentError) as caught:
            _build(net(BF16), kind, {"groups": groups})
        messages.append(str(caught.value))
        module = net(BF16)
        assert _step(module, _build(module, kind, {}))  # the same processes go on
    return messages


@pytest.mark.parametrize("odd", [0, 3])
def test_other_groups_are_named(ranks: RankPool, odd: int) -> None:
    """Ranks that reduce over the same group agree on its parts, too."""
    told = ranks.run(4, _sharded_otherwise, odd)
    values = {0: ("[0, 1] on rank 0", "[0, 1, 2, 3] on rank 1"), 3: ("[0, 1, 2, 3] on rank 2", "[2, 3] on rank 3")}
    first, second = values[odd]
    for messages in told:
        for message in messages:
            assert message.startswith(f"groups.data_shard is ranks {first} and ranks {second}, ")


def _with_values_that_differ(vouched: list[bool]) -> str:
    """Return the error of require_same, or nothing."""
    rank = dist.get_rank()
    module = net(BF16, seed=rank)
    sync = GradSync(module.named_parameters())
    groups = ParallelGroups.of(None)
    try:
        require_same(module.named_parameters(), groups, "pass it", values_may_differ=vouched[rank])
    except ArgumentError as error:
        return str(error)
    assert sync.buckets
    return ""


def test_values_may_differ_on_all_ranks_alone(ranks: RankPool) -> None:
    """Where values may differ nothing else may: the leave itself is compared."""
    assert ranks.run(2, _with_values_that_differ, [True, True]) == [""] * 2
    apart = ranks.run(2, _with_values_that_differ, [False, False])
    assert apart[0] == apart[1]
    assert apart[0].startswith("parameters differ between data-parallel ranks: 'first.weight'")
    told = ranks.run(2, _with_values_that_differ, [False, True])
    assert told[0] == told[1]
    assert told[0].startswith("replicas_may_differ is False on rank 0 and True on rank 1, ")


def _collectives() -> list[int]:
    """Return how many collectives a construction takes of each kind: one exchange of objects is two."""
    counts = []
    for kind in ("DistributedOptimizer", "GradSync"):
        module = net(BF16)
        with CommDebugMode() as mode:
            _build(module, kind, {})
        counts.append(mode.get_total_counts())
    return counts


def test_construction_takes_one_exchange(ranks: RankPool) -> None:
    """Arguments, parameters and values are compared at once."""
    assert ranks.run(2, _collectives) == [[2, 2]] * 2


def _experts_of_its_own(rows: list[int]) -> list[Any]:
    """Train a module whose expert has ``rows`` on each rank: reduced over all ranks, or by each rank alone."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, rows[dist.get_rank()]))
    for param in module[1].parameters():
        param.allreduce = False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    results: list[Any] = []
    for kind in ("DistributedOptimizer", "GradSync"):
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(0.5)
        for experts in (dist.group.WORLD, None):
            groups = ParallelGroups(data_parallel=dist.group.WORLD, expert_data_parallel=experts)
            try:
                optimizer = _build(module, kind, {"groups": groups})  # type: ignore[arg-type]
            except ArgumentError as error:
                results.append(str(error))
                continue
            module(torch.ones(2, 4)).square().mean().backward()
            results.append(bool(optimizer.step().success))
            del optimizer
    return results


def test_experts_are_compared_with_their_own_replicas(ranks: RankPool) -> None:
    """Experts of each rank's own may have other shapes; those that ranks reduce together may not."""
    told = ranks.run(2, _experts_of_its_own, [5, 6])
    assert told[0] == told[1]
    assert told[0][1] is told[0][3] is True
    for message in (told[0][0], told[0][2]):
        assert "is '1.weight' (torch.float32, shape (5, 3), cpu" in message


def _other_call() -> str:
    module = net(BF16)
    try:
        if dist.get_rank() == 1:
            raise_together(None, dist.group.WORLD)
        else:
            _build(module, "DistributedOptimizer", {})
    except ArgumentError as error:
        return str(error)
    return ""


def test_other_call_is_told_apart(ranks: RankPool) -> None:
    """A rank that makes another call that exchanges is told by the rank that builds: no bare error."""
    told = ranks.run(2, _other_call)
    assert told[0].startswith("the object that reduces gradients is a DistributedOptimizer on rank 0 and a different ")
    assert told[1] == ""
