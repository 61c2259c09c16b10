"""A rank dies in the middle of a step: the others end with an error, none waits for ever."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.test_distributed_optimizer import batch, net, sharded
from tests.pool import GLOO_TIMEOUT_S, RankPool

LAST_WORDS = "the others notice"


def _die_in_backward(victim: int, at_step: int, overlap: bool) -> Any:
    module = net()
    optimizer = sharded(module, overlap_param_gather=overlap)
    assert len(optimizer.grad_sync.buckets) > 2
    started = time.monotonic()

    def die(grad: Tensor) -> None:
        # Backward has reached the first layer: reductions of the later ones are under way.
        if step == at_step and dist.get_rank() == victim:
            assert optimizer.grad_sync._next > 0
            os.kill(os.getpid(), signal.SIGKILL)

    module.norm.weight.register_hook(die)
    for step in range(20):
        optimizer.zero_grad()
        try:
            loss = module(batch(step, dist.get_rank(), torch.float16)).float().square().mean()
            optimizer.scale_loss(loss).backward()
            optimizer.step()
        except Exception as error:
            return step, type(error).__name__, time.monotonic() - started
    return 20, LAST_WORDS, 0.0


@pytest.mark.parametrize(
    ("world", "victim", "overlap"), [(2, 1, True), pytest.param(4, 2, False, marks=pytest.mark.slow)]
)
def test_rank_killed_in_backward(ranks: RankPool, world: int, victim: int, overlap: bool) -> None:
    """SIGKILL with buckets in flight: every other rank raises within the process group's timeout, at that very step.

    A rank whose message is of the one that died hears of it at once. Another one may wait for a rank that has heard of
    it, and sends nothing more: that ends with the timeout, or with the process, which a launcher ends.
    """
    with ranks.spawn(world, _die_in_backward, victim, 3, overlap) as fresh:
        outcomes = fresh.outcomes(timeout=GLOO_TIMEOUT_S + 20, grace=GLOO_TIMEOUT_S + 5)
    taken = []
    for outcome in outcomes:
        if outcome.rank == victim:
            assert "died with exit code -9" in (outcome.error or "")
            continue
        assert outcome.value is not None, outcome.error
        step, error, seconds = outcome.value
        # With the gather running on, a rank may hear of it at its next forward.
        assert step in ((3, 4) if overlap else (3,))
        assert error != LAST_WORDS
        taken.append(seconds)
    assert min(taken) < GLOO_TIMEOUT_S / 2, "gloo tells of a lost connection at once"
    assert max(taken) < GLOO_TIMEOUT_S + 15
