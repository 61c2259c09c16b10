"""What one rank alone does otherwise, and the error that every rank raises for it, before a bit has changed.

Two tables: what differs while an optimizer is built, and what differs in a training. To add a row: what the rank does,
and the words of the message; the bodies below try it on the last rank and on the first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
)
from megascale.errors import ArgumentError, GradientError, UsageError
from megascale.grad_sync import GradSync
from megascale.main_params.replica_check import require_same
from megascale.utils.collectives import raise_together
from tests.checkpoint_cases import message_of
from tests.meshes import hybrid_groups
from tests.pool import RankPool

BF16 = torch.bfloat16
Optimizer = MixedPrecisionOptimizer | ChainedOptimizer


class Network(nn.Module):
    """Two layers, and one whose gradients are zeros: they do not tell what a rank does to it."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.idle = nn.Linear(6, 5), nn.Linear(5, width), nn.Linear(5, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss, shape []."""
        hidden = self.first(x)
        out: torch.Tensor = self.second(hidden) + 0.0 * self.idle(hidden)
        return out.float().square().mean()


def _inner(named: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.1, **options)


def _built(way: str, net: Network, scaler: Any, config: OptimizerConfig | None = None) -> tuple[nn.Module, Optimizer]:
    """Return what backward goes through, and the optimizer."""
    named = list(net.named_parameters())
    groups_of_all = [{"params": named[:4]}, {"params": named[4:], "weight_decay": 0.0}]
    if way == "DistributedOptimizer":
        return net, DistributedOptimizer(_inner(groups_of_all), config, scaler, modules=net)
    module: nn.Module = DistributedDataParallel(net) if way == "DDP" else net
    sync = GradSync(named) if way in ("GradSync", "ChainedOptimizer") else None
    groups = ParallelGroups(data_parallel=None, grad_stats=dist.group.WORLD) if way == "stages" else None
    parts: list[Any] = [named[:2], named[2:]] if way == "ChainedOptimizer" else [groups_of_all]
    members = [MixedPrecisionOptimizer(_inner(part), config, scaler, groups=groups, grad_sync=sync) for part in parts]
    return module, members[0] if len(members) == 1 else ChainedOptimizer(members)


def _backward(module: nn.Module, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    dtype = next(module.parameters()).dtype
    optimizer.scale_loss(module(torch.randn(4, 6, generator=generator).to(dtype))).backward()


class Difference(NamedTuple):
    """A row: what one rank does, and what every rank says.

    Attributes:
        what: in words, the test's id.
        do: does it to a network and its optimizer.
        words: of the message.
        ways: how the ranks share the training.
        is_late: it is done between backward and step().
        by_all: every rank does it, and is told whether it is the one that differs; it cannot be mended.
    """

    what: str
    do: Callable[..., object]
    words: str
    ways: tuple[str, ...] = ("DDP",)
    is_late: bool = False
    by_all: bool = False


def _options(**options: Any) -> Callable[[Network, Any], object]:
    return lambda net, optimizer: optimizer.param_groups[0].update(options)


def _attribute(place: str, name: str, value: Any) -> Callable[[Network, Any], object]:
    return lambda net, optimizer: setattr(getattr(optimizer, place) if place else optimizer, name, value)


def _loaded_scale(net: Network, optimizer: Any) -> None:
    optimizer.grad_scaler.load_state_dict({**optimizer.grad_scaler.state_dict(), "scale": torch.tensor([64.0])})


def _loaded_steps(net: Network, optimizer: Any, is_odd: bool) -> None:
    counts = {"step_counts": {"landed": 7, "skipped": 0}} if is_odd else {}
    optimizer.load_state_dict(optimizer.state_dict() | counts)


def _divisor(net: Network, optimizer: Any, is_odd: bool) -> None:
    optimizer.grad_sync.set_divisor(torch.tensor(8.0 + 16 * is_odd))


def _moved(net: Network, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    for listed in ("params", "param_names"):
        first[listed].append(second[listed].pop())


SHARED = ("DDP", "GradSync", "DistributedOptimizer", "ChainedOptimizer")
REPLICATED = ("DDP", "GradSync")
SETTINGS = "hold the same parameters do not take the same step: "
SCALES = "ranks that decide together have other loss scales, or not all of them have one: "
TRAINED = [
    Difference("another rate", _options(lr=0.2), SETTINGS + "lr of param group 0", SHARED),
    Difference("a rate in a tensor", _options(lr=torch.tensor(0.5)), SETTINGS + "lr of param group 0"),
    Difference("another pair of betas", _options(betas=(0.5, 0.9)), SETTINGS + "betas of param group 0"),
    Difference("another direction", _options(maximize=True), SETTINGS + "maximize of param group 0", ("GradSync",)),
    Difference("another norm to clip to", _attribute("", "clip_grad", 0.5), SETTINGS + "clip_grad is ", SHARED),
    Difference("a constant scale", _attribute("", "grad_scaler", ConstantGradScaler(256.0)), SCALES, SHARED),
    Difference("another window", _attribute("grad_scaler", "growth_interval", 7), SCALES, (*SHARED, "stages")),
    Difference("another reset", _attribute("grad_scaler", "hysteresis_reset", "clean_step"), SCALES, ("stages",)),
    Difference("a loaded scale", _loaded_scale, SCALES, (*SHARED, "stages")),
    Difference("another number of steps", _loaded_steps, "the number of steps taken is", ("GradSync",), by_all=True),
    Difference("a parameter in another group", _moved, "the param group of 'idle.bias' is", REPLICATED),
    Difference(
        "a parameter left out",
        lambda net, optimizer: optimizer.param_groups[1]["params"].pop(),
        "the param group of 'idle.bias' is",
        REPLICATED,
        True,
    ),
    Difference(
        "no gradient",
        lambda net, optimizer: net.idle.zero_grad(set_to_none=True),
        "the reason to leave 'idle.weight' out of the step is ",
        is_late=True,
    ),
    Difference(
        "main params reloaded",
        lambda net, optimizer: optimizer.reload_model_params(),
        "the number of times that main params were loaded or reloaded is",
        REPLICATED,
    ),
    Difference(
        "a step hook",
        lambda net, optimizer: optimizer._inner.register_step_pre_hook(lambda *_: None),
        "AdamW's own step(), backend ",
        REPLICATED,
    ),
    Difference(
        "another divisor of shards",
        _divisor,
        "the divisor given to grad_sync.set_divisor() is ",
        ("DistributedOptimizer",),
        is_late=True,
        by_all=True,
    ),
]


def _trained(what: str, way: str, odd: int) -> tuple[str, bool, bool]:
    """Have one rank differ at the second step. Returns the message, whether all is unchanged, and goes on."""
    row = next(row for row in TRAINED if row.what == what)
    net = Network(3 + dist.get_rank() if way == "stages" else 3).half()
    module, optimizer = _built(way, net, DynamicGradScaler(256.0), OptimizerConfig(fp16=True))
    _backward(module, optimizer, 0)
    optimizer.step()
    is_odd = dist.get_rank() == odd

    def differ() -> None:
        if row.by_all:
            row.do(net, optimizer, is_odd)
        elif is_odd:
            row.do(net, optimizer)

    if not row.is_late:
        differ()
    _backward(module, optimizer, 1)
    before = [param.detach().clone() for param in net.parameters()]
    if row.is_late:
        differ()
    message = message_of(UsageError, optimizer.step)
    unchanged = all(map(torch.equal, net.parameters(), before))
    if not row.by_all:
        if not is_odd:
            row.do(net, optimizer)  # now it is alike
        _backward(module, optimizer, 2)
        optimizer.step()
    return message, unchanged, all(param.isfinite().all() for param in net.parameters())


@pytest.mark.default(
    "another rate-GradSync",
    "a loaded scale-stages",
    "a step hook-DDP",
    "another divisor of shards-DistributedOptimizer",
)
@pytest.mark.parametrize(("what", "way"), [(row.what, way) for row in TRAINED for way in row.ways])
def test_what_one_rank_does_is_every_ranks_error(ranks: RankPool, what: str, way: str) -> None:
    """Invariants 12 and 13: it would let ranks part in silence. All raise one error that names it, before a bit has
    changed, and go on once it is the same everywhere.
    """
    [words] = [row.words for row in TRAINED if row.what == what]
    for size, odd in ((2, 0), (4, 2)):
        results = ranks.run(size, _trained, what, way, odd)
        assert len({message for message, *_ in results}) == 1
        for message, unchanged, goes_on in results:
            assert words in message
            assert f"rank {odd}" in message
            assert unchanged
            assert goes_on


class Construction(NamedTuple):
    """A row: the class that is built, the argument of one rank alone or what it does first, and what all say."""

    kind: str
    argument: str
    value: Any
    words: str


def _reordered(named: Any) -> list[Any]:
    return list(named)[::-1]


def _in_two_groups(named: Any) -> list[Any]:
    return [{"params": named[:-1]}, {"params": named[-1:]}]


BUILT = [
    *(
        Construction(kind, name, value, f"{name} is ")
        for kind, arguments in (
            ("DistributedOptimizer", {"overlap_grad_reduce": False, "overlap_param_gather": True}),
            ("DistributedOptimizer", {"shard": "parameters", "broadcast_params": True}),
            ("GradSync", {"overlap": False}),
        )
        for name, value in arguments.items()
    ),
    *(
        Construction(kind, name, value, f"{name} is ")
        for kind in ("DistributedOptimizer", "GradSync")
        for name, value in {
            **{"bucket_numel": 10, "grad_dtype": BF16, "reduce_dtype": BF16, "reduction": "sum"},
        }.items()
    ),
    *(
        Construction(kind, name, value, words)
        for kind in ("DistributedOptimizer", "GradSync")
        for name, value, words in (
            ("order", _reordered, "parameter 0 of the optimizer is "),
            ("order", _in_two_groups, ", DEVICE, param group 1)"),
            (
                "network",
                lambda net: net.second.bias.requires_grad_(False),
                "'second.bias' (torch.bfloat16, shape (3,)",
            ),
            ("network", lambda net: net.second.float(), "'second.weight' (torch.float32, shape (3, 5)"),
            ("groups", hybrid_groups, "groups.data_shard is range("),
        )
    ),
    Construction("GradSync", "sync_order", _reordered, "parameter 0 of the GradSync's buckets is "),
    Construction("GradSync", "kind", "DistributedOptimizer", "the object that reduces gradients is a "),
]


def _build(net: nn.Module, kind: str, **options: Any) -> MixedPrecisionOptimizer:
    named = list(net.named_parameters())
    inner = _inner(options.pop("order", list)(named))
    if kind == "DistributedOptimizer":
        return DistributedOptimizer(inner, modules=net, **options)
    synced = options.pop("sync_order", list)(named)
    return MixedPrecisionOptimizer(inner, groups=options.get("groups"), grad_sync=GradSync(synced, **options))


def _hooks(net: nn.Module) -> int:
    on_params = sum(len(param._post_accumulate_grad_hooks or ()) for param in net.parameters())
    return on_params + sum(len(part._forward_pre_hooks) for part in net.modules())


def _begun_apart(index: int, odd: int) -> tuple[str, bool, bool, str]:
    """Build each rank's own, then the same on every rank.

    Returns the message, whether nothing is left, whether a step landed, and the kind of device.
    """
    row, net, options = BUILT[index], Network().to(BF16), dict[str, Any]()
    kind, value = row.kind, row.value
    groups = value() if row.argument == "groups" else None  # made by all ranks
    if dist.get_rank() == odd:
        if row.argument == "network":
            value(net)
        elif row.argument == "kind":
            kind = value
        else:
            options[row.argument] = groups or value
    before = [param.data_ptr() for param in net.parameters()]
    message = message_of(ArgumentError, lambda: _build(net, kind, **options))
    untouched = _hooks(net) == 0 and [param.data_ptr() for param in net.parameters()] == before
    net = Network().to(BF16)
    optimizer = _build(net, row.kind)
    _backward(net, optimizer, 0)
    return message, untouched, bool(optimizer.step().success), torch.get_default_device().type


@pytest.mark.default("*-bucket_numel", "GradSync-kind")
@pytest.mark.parametrize("index", range(len(BUILT)), ids=[f"{row.kind}-{row.argument}" for row in BUILT])
def test_what_one_rank_builds_otherwise_is_named_on_all(ranks: RankPool, index: int) -> None:
    """Invariants 7 and 12: every argument, parameter and order that decides about messages is compared. Every rank
    names it, keeps nothing of what was built, and may build again.
    """
    for size, odd in ((2, 0), (4, 3)):
        if BUILT[index].argument == "groups" and size == 2:
            continue  # they are four ranks' two halves
        results = ranks.run(size, _begun_apart, index, odd)
        assert len({message for message, *_ in results}) == 1
        for message, untouched, landed, device in results:
            assert BUILT[index].words.replace("DEVICE", device) in message
            assert f"on rank {odd}" in message
            assert "build it alike on every rank: the same class and arguments" in message
            assert untouched
            assert landed


def _after_an_error() -> str:
    net = Network()
    module, optimizer = _built("DDP", net, None)
    _backward(module, optimizer, 0)
    optimizer.step()
    _backward(module, optimizer, 1)
    if dist.get_rank():
        net.first.weight.grad = torch.zeros(5, 6).to_sparse()
    message_of(GradientError, optimizer.step)
    _backward(module, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.5 if dist.get_rank() else 0.1
    return message_of(UsageError, optimizer.step)


def test_a_setting_is_named_after_a_step_that_failed(ranks: RankPool) -> None:
    """The rank that failed has read no settings in that step: the others' are not compared with its next ones."""
    for message in ranks.run(2, _after_an_error):
        assert "lr of param group 0 is 0.1 on rank 0 and 0.5 on rank 1;" in message


def _vouched_by_one(other: int) -> str:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(net.parameters()), replicas_may_differ=dist.get_rank() == other)
    net(torch.ones(2, 4)).sum().backward()  # the same on all ranks
    return message_of(UsageError, optimizer.step)


def test_replicas_that_may_differ_on_one_rank_alone_are_named(ranks: RankPool) -> None:
    """Invariant 12: it is the first of their facts, and where ranks may differ the only one."""
    for other in (0, 1):
        for message in ranks.run(2, _vouched_by_one, other):
            told = f"replicas_may_differ is {other == 0} on rank 0 and {other == 1} on rank 1"
            assert SETTINGS + told in message


def _built_too_early(groups: ParallelGroups | None) -> str:
    world = dist.group.WORLD
    dist.group.WORLD = None
    try:
        net = nn.Linear(4, 4)
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD(net.parameters()), groups=groups)
    finally:
        dist.group.WORLD = world
    net(torch.ones(2, 4)).sum().backward()
    return message_of(UsageError, optimizer.step) if groups is None else str(bool(optimizer.step().success))


def test_an_optimizer_that_was_built_before_its_ranks_is_refused(ranks: RankPool) -> None:
    """It would decide alone, on every rank; groups that say so are taken."""
    for message in ranks.run(2, _built_too_early, None):
        assert "built before torch.distributed.init_process_group()" in message
        assert "there are 2 ranks" in message
    assert ranks.run(2, _built_too_early, ParallelGroups()) == ["True"] * 2


def _with_values_that_differ(vouched: list[bool]) -> str:
    """Return the error of require_same, or nothing."""
    rank = dist.get_rank()
    module = Network().to(BF16)
    with torch.no_grad():
        module.first.weight.add_(rank)
    sync = GradSync(module.named_parameters())
    groups = ParallelGroups.of(None)
    try:
        require_same(module.named_parameters(), groups, {}, values_may_differ=vouched[rank])
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
        module = Network().to(BF16)
        with CommDebugMode() as mode:
            _build(module, kind)
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
                optimizer = _build(module, kind, groups=groups)
            except ArgumentError as error:
                results.append(str(error))
                continue
            module(torch.ones(2, 4)).square().mean().backward()
            results.append(bool(optimizer.step().success))
            del optimizer
    return [*results, torch.get_default_device().type]


def test_experts_are_compared_with_their_own_replicas(ranks: RankPool) -> None:
    """Experts of each rank's own may have other shapes; those that ranks reduce together may not."""
    told = ranks.run(2, _experts_of_its_own, [5, 6])
    assert told[0] == told[1]
    assert told[0][1] is told[0][3] is True
    for message in (told[0][0], told[0][2]):
        assert f"is '1.weight' (torch.float32, shape (5, 3), {told[0][4]}" in message


def _other_call() -> str:
    module = Network().to(BF16)
    try:
        if dist.get_rank() == 1:
            raise_together(None, dist.group.WORLD)
        else:
            _build(module, "DistributedOptimizer")
    except ArgumentError as error:
        return str(error)
    return ""


def test_other_call_is_told_apart(ranks: RankPool) -> None:
    """A rank that makes another call that exchanges is told by the rank that builds: no bare error."""
    told = ranks.run(2, _other_call)
    assert told[0].startswith("the object that reduces gradients is a DistributedOptimizer on rank 0 and a different ")
    assert told[1] == ""
