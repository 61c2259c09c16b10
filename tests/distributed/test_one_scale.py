"""Ranks that decide together have one loss scale, one rule, and a scaler everywhere or nowhere, whatever they hold.

Each rank has a module and a scaler of its own, as the stages of a pipeline have. Gradients cross from one to another,
multiplied by the scale of the last stage.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
    MixedPrecisionOptimizer,
    ParallelGroups,
)
from megascale.errors import UsageError
from tests.checkpoint_cases import message_of
from tests.pool import RankPool
from tests.training import grad_of, set_grads


def _stage(
    scaler: MegatronGradScaler | None, *, chained: bool = False
) -> tuple[nn.Linear, MixedPrecisionOptimizer | ChainedOptimizer]:
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(4, 3 + dist.get_rank()).to(torch.bfloat16)
    groups = ParallelGroups(data_parallel=None, grad_stats=dist.group.WORLD)
    named = list(module.named_parameters())
    halves = [named[:1], named[1:]] if chained and dist.get_rank() == 0 else [named]
    members = [
        MixedPrecisionOptimizer(torch.optim.SGD(half, lr=0.1), None, scaler, groups=groups, grads_are_scaled=True)
        for half in halves
    ]
    return module, ChainedOptimizer(members) if len(members) > 1 else members[0]


def _loaded(scaler: MegatronGradScaler) -> MegatronGradScaler:
    scaler.load_state_dict({**scaler.state_dict(), "scale": torch.tensor([512.0])})
    return scaler


def _written(scaler: MegatronGradScaler) -> MegatronGradScaler:
    scaler.live_scale.fill_(512.0)
    return scaler


OTHERS: dict[str, tuple[Callable[[], MegatronGradScaler | None], str]] = {
    "another first scale": (lambda: DynamicGradScaler(512.0), "512.0"),
    "a loaded scale": (lambda: _loaded(DynamicGradScaler(64.0)), "512.0"),
    "a written scale": (lambda: _written(DynamicGradScaler(64.0)), "the loss scale is"),
    "another window": (lambda: DynamicGradScaler(64.0, growth_interval=7), "7"),
    "another rule": (lambda: ConstantGradScaler(64.0), "ConstantGradScaler"),
    "no scaler": (lambda: None, "None on rank"),
}


def _differing(name: str, culprit: int, chained: bool) -> tuple[str, bool]:
    scaler = OTHERS[name][0]() if dist.get_rank() == culprit else DynamicGradScaler(64.0)
    module, optimizer = _stage(scaler, chained=chained)
    before = [param.detach().clone() for param in module.parameters()]
    set_grads(module, 0)
    message = message_of(UsageError, optimizer.step)
    return message, all(map(torch.equal, module.parameters(), before))


@pytest.mark.default("a loaded scale", "another first scale", "another window")
@pytest.mark.parametrize("name", OTHERS)
def test_another_scaler_on_one_rank_is_every_ranks_error(ranks: RankPool, name: str) -> None:
    """Invariant 13: gradients that crossed from one rank to another would be divided by a scale that did not multiply
    them. All ranks name both scalers before a bit has changed.
    """
    for size, culprit, chained in ((2, 0, False), (2, 1, False), (4, 2, True)):
        for message, unchanged in ranks.run(size, _differing, name, culprit, chained):
            assert "ranks that decide together have other loss scales, or not all of them have one: " in message
            assert OTHERS[name][1] in message
            assert f"on rank {culprit or 1}" in message
            assert unchanged


def _same(rank_with_a_chain: int) -> tuple[list[bool], float, int]:
    """Train stages of other shapes, other optimizers and other histories, with one scaler each."""
    module, optimizer = _stage(DynamicGradScaler(64.0, growth_interval=2), chained=rank_with_a_chain == 0)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + dist.get_rank())
    if dist.get_rank() == 1:
        optimizer.reload_model_params()
    landed = []
    for seed in range(6):
        set_grads(module, seed)
        if seed == 3 and dist.get_rank() == 1:
            grad_of(module.bias)[0] = torch.inf
        landed.append(bool(optimizer.step().success))
    return landed, optimizer.get_loss_scale().item(), len(list(module.parameters()))


def test_other_parameters_and_options_are_no_error(ranks: RankPool) -> None:
    """What only ranks that hold the same parameters share may differ: options, reloads, members of a chain."""
    for size in (2, 4):
        expected = ([True, True, True, False, True, True], 256.0, 2)
        assert ranks.run(size, _same, 0) == [expected] * size


def _found_late() -> tuple[bool, str]:
    """The scale parts in mid-training: one rank loads a checkpoint of its module."""
    module, optimizer = _stage(DynamicGradScaler(64.0))
    for seed in range(3):
        set_grads(module, seed)
        optimizer.step()
    state = optimizer.state_dict()
    state["grad_scaler"]["scale"] = torch.tensor([512.0 if dist.get_rank() else 64.0])
    optimizer.load_state_dict(state)
    set_grads(module, 3)
    message = message_of(UsageError, optimizer.step)
    state["grad_scaler"]["scale"] = torch.tensor([64.0])
    optimizer.load_state_dict(state)
    set_grads(module, 4)
    return bool(optimizer.step().success), message


def test_ranks_go_on_once_the_scale_is_one(ranks: RankPool) -> None:
    """Invariant 13: a module's own checkpoint may bring another scale; loading the same one everywhere mends it."""
    for success, message in ranks.run(2, _found_late):
        assert success
        assert "have other loss scales" in message


def _replicas_that_may_differ(culprit: int) -> str:
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(4, 3).half()
    scaler = DynamicGradScaler(512.0 if dist.get_rank() == culprit else 64.0)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(module.named_parameters(), lr=0.1 + dist.get_rank()),
        None,
        scaler,
        grads_are_scaled=True,
        replicas_may_differ=True,
    )
    set_grads(module, dist.get_rank())
    return message_of(UsageError, optimizer.step)


def test_replicas_that_may_differ_have_one_scale_all_the_same(ranks: RankPool) -> None:
    """Invariant 13: replicas_may_differ=True allows other gradients and options; norm and skip are still one."""
    for message in ranks.run(2, _replicas_that_may_differ, 1):
        assert "have other loss scales" in message
