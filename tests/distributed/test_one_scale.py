"""Ranks that decide together have one loss scale, one rule, and a scaler everywhere or nowhere, whatever they hold.

Each rank has a module and a scaler of its own, as the stages of a pipeline have. Gradients cross from one to another,
multiplied by the scale of the last stage.
"""

import torch
import torch.distributed as dist
from torch import nn

from megascale import (
    ChainedOptimizer,
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
