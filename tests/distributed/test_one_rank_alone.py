"""What one rank alone does, and gradients do not tell: a named error on every rank, before a bit changes."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megascale import ChainedOptimizer, DistributedOptimizer, MixedPrecisionOptimizer, ParallelGroups
from megascale.errors import GradientError, UsageError
from megascale.grad_sync import GradSync
from tests.checkpoint_cases import message_of
from tests.pool import RankPool


def _two_branches(way: str) -> tuple[nn.Module, nn.ModuleDict, MixedPrecisionOptimizer]:
    """Return what backward goes through, and an optimizer of two branches, of which the second has zero gradients."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
    named = list(net.named_parameters())
    inner = torch.optim.AdamW(named, lr=0.1, weight_decay=0.1)
    if way == "DistributedOptimizer":
        optimizer: MixedPrecisionOptimizer = DistributedOptimizer(inner, modules=net)
    else:
        optimizer = MixedPrecisionOptimizer(inner, grad_sync=GradSync(named) if way == "GradSync" else None)
    both = _Sum(net)
    return DistributedDataParallel(both) if way == "DDP" else both, net, optimizer


class _Sum(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.parts["used"](x) + 0.0 * self.parts["idle"](x)
        return out


def _backward(module: nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 4) * (1 + dist.get_rank())).square().mean().backward()


MISCHIEF: dict[str, tuple[Callable[[nn.ModuleDict, MixedPrecisionOptimizer], object], str]] = {
    "left out": (
        lambda net, optimizer: optimizer.param_groups[0]["params"].pop(),
        "the param group of 'idle.bias' is 0 on rank 0 and None on rank 1;",
    ),
    "no gradient": (
        lambda net, optimizer: net["idle"].zero_grad(set_to_none=True),
        "rank 1: parameter 'idle.weight', 'idle.bias' takes no part in the step on this rank",
    ),
    "reloaded": (
        lambda net, optimizer: optimizer.reload_model_params(),
        "the number of times that main params were loaded or reloaded is 0 on rank 0 and 1 on rank 1;",
    ),
    "rate in a tensor": (
        lambda net, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.5)),
        "lr of param group 0 is 0.1 on rank 0 and 0.5 on rank 1;",
    ),
    "hook": (
        lambda net, optimizer: optimizer.optimizer.register_step_pre_hook(lambda *_: None),
        "is 'AdamW, backend native' on rank 0 and \"AdamW's own step(), backend native\" on rank 1;",
    ),
}


def _mischief(way: str, kind: str) -> tuple[str, bool, str]:
    module, net, optimizer = _two_branches(way)
    _backward(module, optimizer)
    optimizer.step()
    _backward(module, optimizer)
    before = [param.detach().clone() for param in net.parameters()]
    if dist.get_rank():
        MISCHIEF[kind][0](net, optimizer)
    message = message_of(UsageError, optimizer.step)
    unchanged = all(torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))
    return message, unchanged, optimizer.backend.name


@pytest.mark.parametrize("way", ["DDP", "GradSync"])
@pytest.mark.parametrize("kind", MISCHIEF)
def test_what_one_rank_alone_does_is_named(ranks: RankPool, way: str, kind: str) -> None:
    """Invariant 12: ranks parted in silence, as gradients of zeros do not tell these apart."""
    if (way, kind) == ("GradSync", "no gradient"):
        pytest.skip("gradients of a GradSync are its own")
    for message, unchanged, backend in ranks.run(2, _mischief, way, kind):
        assert MISCHIEF[kind][1].replace("native", backend) in message
        assert unchanged


def _reloaded_member() -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    named, module = list(net.named_parameters()), DistributedDataParallel(net)
    members = [MixedPrecisionOptimizer(torch.optim.AdamW(own)) for own in (named[:2], named[2:])]
    chain = ChainedOptimizer(members)
    for step in range(2):
        if step and dist.get_rank():
            members[0].reload_model_params()
        chain.zero_grad()
        module(torch.ones(2, 4).bfloat16() * (1 + dist.get_rank())).float().square().mean().backward()
        if step:
            return message_of(UsageError, chain.step)
        chain.step()
    return ""


def test_a_member_that_is_reloaded_on_one_rank_is_named(ranks: RankPool) -> None:
    """The chain steps it, and so counts it."""
    for message in ranks.run(2, _reloaded_member):
        assert "main params were loaded or reloaded is 0 on rank 0 and 1 on rank 1;" in message


def _divided_shards(divisors: tuple[float, float]) -> str:
    module, _, optimizer = _two_branches("DistributedOptimizer")
    assert isinstance(optimizer, DistributedOptimizer)
    _backward(module, optimizer)
    optimizer.grad_sync.set_divisor(torch.tensor(divisors[dist.get_rank()]))
    return message_of(UsageError, optimizer.step)


def test_divisors_of_shards_are_compared(ranks: RankPool) -> None:
    """Invariant 12: each shard would be divided by another number, which no comparison of replicas can see."""
    for message in ranks.run(2, _divided_shards, (8.0, 24.0)):
        assert "the divisor given to grad_sync.set_divisor() is 8.0 on rank 0 and 24.0 on rank 1;" in message


def _after_an_error() -> str:
    module, net, optimizer = _two_branches("DDP")
    _backward(module, optimizer)
    optimizer.step()
    _backward(module, optimizer)
    if dist.get_rank():
        net["used"].weight.grad = torch.zeros(4, 4).to_sparse()
    message_of(GradientError, optimizer.step)
    _backward(module, optimizer)
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
    """Invariant 12: that rank votes on nothing, so that the others' numbers do not add up to 0."""
    for other in (0, 1):
        for message in ranks.run(2, _vouched_by_one, other):
            told = f"replicas_may_differ is {other == 0} on rank 0 and {other == 1} on rank 1;"
            assert f"hold the same parameters have other settings: {told}" in message


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
