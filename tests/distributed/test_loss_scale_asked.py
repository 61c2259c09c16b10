"""Of a pipeline one rank has the loss: it suffices that any rank has asked for its scale."""

import pytest
import torch
import torch.distributed as dist

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import UsageError
from tests.pool import RankPool
from tests.training import model, same_bits, set_grads, snapshot


def _asked_on(rank: int) -> list[object]:
    module = model()
    scaler = DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 100, 1)
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters()), None, scaler)
    set_grads(module, 0)
    if dist.get_rank() == rank:
        optimizer.get_loss_scale()
    landed = bool(optimizer.step().success)
    before = snapshot(optimizer, module)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return [landed, str(caught.value), same_bits(before, snapshot(optimizer, module))]


def test_one_rank_that_asks_speaks_for_all(ranks: RankPool) -> None:
    """Invariant 7: where no rank has asked every rank raises; where one has, none does."""
    for landed, message, unchanged in ranks.run(4, _asked_on, 3):
        assert landed
        assert str(message).startswith("the loss was not scaled: neither")
        assert unchanged
