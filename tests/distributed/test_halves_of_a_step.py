"""The two halves of a step on several ranks: what all have prepared is taken once, on all or on none."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import UsageError
from tests.checkpoint_cases import message_of
from tests.pool import RankPool
from tests.training import bits_equal


def _optimizer(kind: str) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).half()
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 1, 1)
    if kind == "sharded":
        return module, DistributedOptimizer(inner, None, scaler, modules=module)
    return module, MixedPrecisionOptimizer(inner, None, scaler)


def _backward(module: nn.Module, optimizer: MixedPrecisionOptimizer, seed: int) -> None:
    optimizer.zero_grad()
    inputs = torch.full((2, 6), 0.1 * (seed + 1)).half()
    optimizer.scale_loss(module(inputs).float().square().sum()).backward()


def _prepared_and_stepped(kind: str, reader: int) -> bool:
    """Whether prepare_grads() and step() train as step() alone, where rank ``reader`` logs the scale in between."""
    (module, optimizer), (twin, whole) = _optimizer(kind), _optimizer(kind)
    for seed in range(4):
        _backward(module, optimizer, seed)
        _backward(twin, whole, seed)
        optimizer.prepare_grads()
        if dist.get_rank() == reader:
            optimizer.get_loss_scale().item()
        optimizer.step()
        whole.step()
    return all(map(bits_equal, module.parameters(), twin.parameters())) and bool(
        optimizer.get_loss_scale() == whole.get_loss_scale()
    )


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_step_carries_out_what_ranks_have_prepared(ranks: RankPool, kind: str) -> None:
    """Invariant 1: whichever rank reads the scale in between, all take the prepared step, once."""
    for reader in range(2):
        assert ranks.run(2, _prepared_and_stepped, kind, reader) == [True, True]


def _measured_twice(culprit: int) -> str:
    module, optimizer = _optimizer("replicated")
    _backward(module, optimizer, 0)
    optimizer.prepare_grads()
    if dist.get_rank() != culprit:
        _backward(module, optimizer, 1)
    return message_of(UsageError, optimizer.prepare_grads)


def test_gradients_that_one_rank_measures_twice_are_every_ranks_error(ranks: RankPool) -> None:
    """Invariant 7: a rank without new gradients prepares again, the other has new ones: no rank waits."""
    for culprit in range(2):
        for message in ranks.run(2, _measured_twice, culprit):
            assert message.startswith(f"rank {culprit}: prepare_grads() has measured these gradients already")


def _zeroed_on_one_rank(culprit: int) -> str:
    module, optimizer = _optimizer("replicated")
    _backward(module, optimizer, 0)
    optimizer.prepare_grads()
    if dist.get_rank() == culprit:
        _backward(module, optimizer, 0)

    def two_steps() -> None:
        optimizer.step()
        _backward(module, optimizer, 1)
        optimizer.step()

    return message_of(UsageError, two_steps)


def test_a_prepared_step_that_one_rank_drops_is_every_ranks_error(ranks: RankPool) -> None:
    """Invariant 7: one rank decides anew, the other carries out what it has: they raise at the step after, together."""
    for culprit in range(2):
        for message in ranks.run(2, _zeroed_on_one_rank, culprit):
            assert "number of steps taken" in message
