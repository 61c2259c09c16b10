"""Ranks that run out of batches one by one: DistributedDataParallel.join() around steps."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.cells import Cell, integers
from tests.pool import RankPool

CELL = Cell(torch.float16, "replicated")
"""DistributedDataParallel around shards of ours is refused, FSDP2 has no join(), and no kind of state is looked at."""


def _train(batches: Sequence[int], options: dict[str, Any]) -> tuple[list[Tensor], int, str]:
    """Take a step per batch. Return the weights, the number of steps, and what ended the loop, if anything did.

    ``batches``: how many each rank has; ``options``: of ``join()``.
    """
    model = CELL.model()
    wrapped, optimizer = DistributedDataParallel(model), CELL.optimizer(model)
    grads, ended = integers(CELL.shapes, seed=1), ""
    try:
        with wrapped.join(**options):
            for _ in range(batches[dist.get_rank()]):
                optimizer.zero_grad()
                optimizer.scale_loss(wrapped(grads)).backward()
                optimizer.step()
    except RuntimeError as error:
        ended = str(error)
    return [weight.detach().clone() for weight in model.weights], int(optimizer.num_landed_steps), ended


def test_the_way_out_works(ranks: RankPool) -> None:
    """With throw_on_early_termination=True every rank's loop ends with the shortest, in the bits of as many steps."""
    expected, _, ended = ranks.run(2, _train, (3, 3), {"enable": False})[0]
    assert ended == ""
    for weights, steps, ended in ranks.run(2, _train, (3, 5), {"throw_on_early_termination": True}):
        assert "exhausted" in ended
        assert steps == 3
        assert all(map(torch.equal, weights, expected))
