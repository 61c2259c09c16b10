"""What ranks that hold the same parameters must set alike: a difference is one named error on all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megascale import (
    ChainedOptimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
)
from megascale.errors import UsageError
from megascale.grad_sync import GradSync
from tests.checkpoint_cases import message_of
from tests.pool import RankPool

Optimizer = MixedPrecisionOptimizer | ChainedOptimizer


def _other_config_in_a_chain() -> str:
    net = nn.Linear(2, 2)
    other = OptimizerConfig(exp_avg_dtype=torch.bfloat16 if dist.get_rank() else torch.float32)
    made = [
        MixedPrecisionOptimizer(torch.optim.AdamW([named]), config)
        for named, config in zip(net.named_parameters(), (OptimizerConfig(), other), strict=True)
    ]
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    return message_of(UsageError, ChainedOptimizer(made).step)


def test_a_chains_config_is_named_with_its_place(ranks: RankPool) -> None:
    """Invariant 12: of several optimizers, the message says whose config it is."""
    for message in ranks.run(2, _other_config_in_a_chain):
        assert "optimizers[1].config.exp_avg_dtype is torch.float32 on rank 0 and torch.bfloat16 on rank 1" in message


def _equal() -> list[bool]:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    inner = torch.optim.Adam(net.parameters(), lr=1 if dist.get_rank() else 1.0)
    optimizer = MixedPrecisionOptimizer(inner)
    landed = []
    others: list[dict[str, Any]] = [{}, {"betas": [0.9, 0.999]}, {"weight_decay": -0.0}, {"maximize": 0}]
    for options in others:
        if dist.get_rank():
            inner.param_groups[0].update(options)
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        landed.append(bool(optimizer.step().success))
    return landed


def test_equal_settings_of_other_types_are_alike(ranks: RankPool) -> None:
    """1 is 1.0, a list holds what a tuple holds, and -0.0 is 0.0: the step is taken."""
    assert ranks.run(2, _equal) == [[True] * 4] * 2


def _vouched() -> tuple[float, bool]:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    inner = torch.optim.SGD(net.parameters(), lr=0.1 * (1 + dist.get_rank()))
    optimizer = MixedPrecisionOptimizer(inner, replicas_may_differ=True)
    net(torch.ones(2, 4)).sum().backward()
    return inner.param_groups[0]["lr"], bool(optimizer.step().success)


def test_ranks_that_may_part_set_what_they_like(ranks: RankPool) -> None:
    """replicas_may_differ=True vouches for the settings, too."""
    assert ranks.run(2, _vouched) == [(0.1, True), (0.2, True)]


def _beside_new_parameters() -> tuple[bool, str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    named = list(net.named_parameters())
    net[1].requires_grad_(False)
    sync = GradSync(named[:2])
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(named, lr=0.1), grad_sync=sync)
    net(torch.ones(2, 6)).square().mean().backward()
    landed = bool(optimizer.step().success)
    optimizer.zero_grad()
    net[1].requires_grad_(True)
    sync.add(named[2:])
    net(torch.ones(2, 6)).square().mean().backward()
    optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    return landed, message_of(UsageError, optimizer.step)


def test_a_setting_is_named_beside_new_parameters(ranks: RankPool) -> None:
    """Parameters that are new in the step, with the same values on every rank, are not what differs."""
    for landed, message in ranks.run(2, _beside_new_parameters):
        assert landed
        assert "lr of param group 0 is 0.1 on rank 0 and 1.1 on rank 1;" in message


def _grouped(listing: str, kind: str) -> tuple[str, bool]:
    """Take a step under DDP after rank 1 alone has grouped its parameters as ``kind`` says."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = list(net.named_parameters())
    groups = {
        "usual": [named[:2], named[2:]],
        "moved": [named[:1], named[1:]],
        "exchanged": [[named[0], named[3]], [named[2], named[1]]],  # weights decay, biases too, but others
        "exchanged shapes": [[named[1], named[3]], [named[0], named[2]]],
        "another order": [named[1::-1], named[:1:-1]],
    }[kind if dist.get_rank() else "usual"]
    params = [group if listing == "named" else [param for _, param in group] for group in groups]
    options = [{"params": params[0], "weight_decay": 0.1}, {"params": params[1], "weight_decay": 0.0}]
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(options))
    DistributedDataParallel(net)(torch.ones(2, 3)).square().mean().backward()
    before = [param.detach().clone() for param in net.parameters()]
    if kind == "another order":
        return "", bool(optimizer.step().success)
    message = message_of(UsageError, optimizer.step)
    return message, all(torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("listing", "kind", "told"),
    [
        ("named", "moved", "the param group of '0.bias' is [0] on rank 0 and [1] on rank 1"),
        ("named", "exchanged", "the param group of '0.bias' is [0] on rank 0 and [1] on rank 1"),
        ("unnamed", "moved", "the param group of parameters of shape (3,) is [0, 1] on rank 0 and [1, 1] on rank 1"),
        ("unnamed", "exchanged shapes", "parameters of shape (3, 3) is [0, 1] on rank 0 and [1, 1] on rank 1"),
    ],
)
def test_a_parameter_in_another_group_on_one_rank_is_named(ranks: RankPool, listing: str, kind: str, told: str) -> None:
    """Invariant 12: it would take other options there, in silence, though all options are the same on every rank."""
    for message, unchanged in ranks.run(2, _grouped, listing, kind):
        assert told in message
        assert unchanged


@pytest.mark.parametrize("listing", ["named", "unnamed"])
def test_the_order_within_a_param_group_is_free(ranks: RankPool, listing: str) -> None:
    """Of a rank that lists the same parameters in another order, each takes the same options."""
    assert ranks.run(2, _grouped, listing, "another order") == [("", True)] * 2
