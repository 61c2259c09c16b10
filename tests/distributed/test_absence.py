"""A sharded parameter takes part in the step of every rank, or of none."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megascale import DistributedOptimizer
from megascale.errors import UsageError
from tests.distributed.test_errors_after_decision import _backward, _make, _same_on_all
from tests.pool import RankPool
from tests.training import Bag, bits_equal


def _freeze_one(bag: Bag, optimizer: DistributedOptimizer) -> None:
    bag[1].requires_grad_(False)


def _freeze_most(bag: Bag, optimizer: DistributedOptimizer) -> None:
    for param in bag.params[1:]:
        param.requires_grad_(False)


def _clear_groups(bag: Bag, optimizer: DistributedOptimizer) -> None:
    optimizer.param_groups.clear()


def _take_out(bag: Bag, optimizer: DistributedOptimizer) -> None:
    group = optimizer.param_groups[0]
    group["params"] = group["params"][:1]


LEAVE_OUT: dict[str, Callable[[Bag, DistributedOptimizer], None]] = {
    "freeze_one": _freeze_one,
    "freeze_most": _freeze_most,
    "clear_groups": _clear_groups,
    "take_out": _take_out,
}


def _left_out(how: str, culprits: set[int]) -> tuple[list[str], bool, bool]:
    bag, optimizer = _make("sharded", torch.optim.AdamW)
    assert isinstance(optimizer, DistributedOptimizer)
    for step in range(2):
        _backward(bag, optimizer, step)
        optimizer.step()
    before = [param.detach().clone() for param in bag.params]
    if dist.get_rank() in culprits:
        LEAVE_OUT[how](bag, optimizer)
    told = []
    for step in range(2, 4):
        _backward(bag, optimizer, step)
        try:
            optimizer.step()
        except UsageError as error:
            told.append(str(error))
    unchanged = [bits_equal(param.detach(), value) for param, value in zip(bag.params, before, strict=True)]
    return told, all(unchanged), _same_on_all(bag)


@pytest.mark.default("clear_groups")
@pytest.mark.parametrize("how", LEAVE_OUT)
def test_parameters_that_one_rank_leaves_out_are_named(ranks: RankPool, how: str) -> None:
    """Invariants 7 and 10: all ranks raise, nothing has changed and nobody waits, at every step until it is mended."""
    for culprit in range(2):
        for told, unchanged, same in ranks.run(2, _left_out, how, {culprit}):
            assert len(told) == 2
            for message in told:
                assert "the reason to leave 'params.1' out of the step" in message
                assert f"in no param group on rank {culprit}" in message
            assert unchanged
            assert same


@pytest.mark.default("freeze_one")
@pytest.mark.parametrize("how", LEAVE_OUT)
def test_parameters_that_all_ranks_leave_out_are_left_alone(ranks: RankPool, how: str) -> None:
    """The others are trained on, the same on all ranks."""
    for told, unchanged, same in ranks.run(3, _left_out, how, {0, 1, 2}):
        assert told == []
        assert unchanged == (how == "clear_groups")
        assert same
