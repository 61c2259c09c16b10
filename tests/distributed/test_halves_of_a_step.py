"""The two halves of a step on shards: gradients that the caller drops between them are neither lost nor read early."""

import torch
from torch import Tensor, nn

from megascale import ConstantGradScaler, DistributedOptimizer
from tests.pool import RankPool
from tests.training import bits_equal


def _trained_in_halves(drop: bool) -> list[Tensor]:
    """Return the weights after three steps in halves; ``drop``: the caller drops gradients between them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).half()
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(module.named_parameters(), lr=1e-2),
        None,
        ConstantGradScaler(4.0),
        modules=module,
        bucket_numel=16,
    )
    for index in range(3):
        optimizer.scale_loss(module(torch.full((2, 6), 0.1 * (index + 1)).half()).float().square().sum()).backward()
        optimizer.prepare_grads()
        if drop:
            optimizer.zero_grad()
            _overwritten = [torch.full((16,), 7.0) for _ in range(200)]
        optimizer.step_with_ready_grads()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def _halves() -> bool:
    return all(map(bits_equal, _trained_in_halves(False), _trained_in_halves(True)))


def test_gradients_may_be_dropped_between_the_halves_of_a_step(ranks: RankPool) -> None:
    """zero_grad() after prepare_grads() loses nothing: the step updates from the shards that it has measured."""
    assert ranks.run(2, _halves) == [True, True]
