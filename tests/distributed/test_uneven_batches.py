"""Ranks that run out of batches one by one: DistributedDataParallel.join() around steps."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from megascale import ChainedOptimizer, MixedPrecisionOptimizer
from megascale.errors import UsageError
from tests.cells import FP32_STATE, Cell, integers
from tests.pool import RankPool

REPLICATED = [cell for cell in FP32_STATE if cell.layout == "replicated"]
"""DistributedDataParallel around shards of ours is refused, FSDP2 has no join(), and no kind of state is looked at."""


def _train(cell: Cell, batches: Sequence[int], options: dict[str, Any]) -> tuple[list[Tensor], int, str]:
    """Take a step per batch. Return the weights, the number of steps, and what ended the loop, if anything did.

    ``batches``: how many each rank has; ``options``: of ``join()``.
    """
    model = cell.model()
    wrapped, optimizer = DistributedDataParallel(model), cell.optimizer(model)
    grads, ended = integers(cell.shapes, seed=1), ""
    try:
        with wrapped.join(**options):
            for _ in range(batches[dist.get_rank()]):
                optimizer.zero_grad()
                optimizer.scale_loss(wrapped(grads)).backward()
                optimizer.step()
    except RuntimeError as error:
        ended = str(error)
    return [weight.detach().clone() for weight in model.weights], int(optimizer.num_landed_steps), ended


@pytest.mark.parametrize("cell", REPLICATED, ids=str)
def test_the_way_out_works(cell: Cell, ranks: RankPool) -> None:
    """With throw_on_early_termination=True every rank's loop ends with the shortest, in the bits of as many steps."""
    expected, _, ended = ranks.run(2, _train, cell, (3, 3), {"enable": False})[0]
    assert ended == ""
    for weights, steps, ended in ranks.run(2, _train, cell, (3, 5), {"throw_on_early_termination": True}):
        assert "exhausted" in ended
        assert steps == 3
        assert all(map(torch.equal, weights, expected))


def _chain_in_a_join_of_its_own() -> str:
    """Enter torch's Join with two wrapped models of a chain, after a step outside of it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(torch.bfloat16)
    named, wrapped = list(model.named_parameters()), [DistributedDataParallel(part) for part in model]
    chain = ChainedOptimizer(
        [MixedPrecisionOptimizer(torch.optim.SGD(part, lr=0.5)) for part in (named[:2], named[2:])]
    )

    def backward() -> None:
        sum(one(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum() for one in wrapped).backward()

    backward()
    assert chain.step().success
    before = [param.detach().clone() for one in wrapped for param in one.parameters()]
    backward()
    with Join([*wrapped]), pytest.raises(UsageError) as caught:
        chain.step()
    assert all(map(torch.equal, before, (param for one in wrapped for param in one.parameters())))
    return str(caught.value)


def test_a_join_that_begins_later_is_seen(ranks: RankPool) -> None:
    """A step before join() does not hide it, nor does a chain of optimizers. Nothing has changed."""
    for message in ranks.run(2, _chain_in_a_join_of_its_own):
        assert "DistributedDataParallel.join()" in message
