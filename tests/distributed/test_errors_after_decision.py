"""Errors after ranks have decided to step: every rank raises them at the next step, and none waits for another."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale import ChainedOptimizer, DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import GradientError, InnerStepError, MegascaleError
from megascale.grad_sync import GradSync
from tests.pool import RankPool
from tests.training import Bag, bits_equal

SHAPES = ((4, 4), (9,), (40, 2))


def _make(kind: str, inner: Any = torch.optim.RMSprop) -> tuple[Bag, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    bag = Bag(torch.randn(shape).half() for shape in SHAPES)
    optimizer = inner(bag.named_parameters(), lr=1e-2)
    scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 3, 1)
    if kind == "sharded":
        return bag, DistributedOptimizer(optimizer, None, scaler, modules=bag, bucket_numel=32, elementwise=True)
    if kind == "owners":
        return bag, DistributedOptimizer(optimizer, None, scaler, modules=bag, bucket_numel=32, shard="parameters")
    sync = GradSync(bag.named_parameters(), bucket_numel=32) if kind == "grad_sync" else None
    return bag, MixedPrecisionOptimizer(optimizer, None, scaler, grad_sync=sync)


def _switch_momentum_on(optimizer: MixedPrecisionOptimizer, culprit: int) -> None:
    """As OneCycleLR does it: the rank ``culprit`` then lacks a buffer."""
    optimizer.param_groups[0]["momentum"] = 0.9
    if dist.get_rank() != culprit:
        for state in optimizer._inner.state.values():
            state["momentum_buffer"] = torch.zeros_like(state["square_avg"])


def _backward(bag: Bag, optimizer: MixedPrecisionOptimizer | ChainedOptimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss = torch.stack([(param.float() * torch.randn(param.shape)).sum() for param in bag.params]).sum()
    optimizer.scale_loss(loss).backward()


def _same_on_all(bag: Bag) -> bool:
    total = torch.cat([param.detach().float().reshape(-1) for param in bag.params])
    gathered = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, total)
    return all(bits_equal(gathered[0], one) for one in gathered)


def _inner_step_fails(kind: str, culprit: int) -> tuple[str, str, list[bool]]:
    bag, optimizer = _make(kind)
    for step in range(2):
        _backward(bag, optimizer, step)
        optimizer.step()
    saved = optimizer.state_dict()
    weights = [param.detach().clone() for param in bag.params]
    _backward(bag, optimizer, 2)
    _switch_momentum_on(optimizer, culprit)
    optimizer.step()
    _backward(bag, optimizer, 3)
    with pytest.raises(MegascaleError) as caught:
        optimizer.step()
    rounded = [
        bits_equal(main.half(), part)
        for (_, main), part in zip(
            optimizer.main_params(), (p.part for p in optimizer._recipe.members[0].main_params), strict=True
        )
    ]
    optimizer.param_groups[0]["momentum"] = 0
    with torch.no_grad():
        for param, weight in zip(bag.params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(saved)
    _backward(bag, optimizer, 4)
    landed = bool(optimizer.step().success)
    return type(caught.value).__name__, str(caught.value), [*rounded, landed, _same_on_all(bag)]


@pytest.mark.default("replicated")
@pytest.mark.parametrize("kind", ["replicated", "grad_sync", "sharded", "owners"])
def test_error_of_the_optimizers_own_step_is_every_ranks(ranks: RankPool, kind: str) -> None:
    """Invariant 7: model params are whole, the next step raises on all ranks, and a load makes all of it good."""
    for culprit in range(2):
        for name, message, is_right in ranks.run(2, _inner_step_fails, kind, culprit):
            assert name == InnerStepError.__name__
            assert message.startswith(f"rank {culprit}: RMSprop.step() raised KeyError: 'momentum_buffer'")
            assert "load a checkpoint" in message
            assert all(is_right)


def _gradient_changes(kind: str, culprit: int) -> tuple[str, str, bool]:
    bag, optimizer = _make(kind, torch.optim.AdamW)
    for step in range(2):
        _backward(bag, optimizer, step)
        optimizer.step()
    _backward(bag, optimizer, 2)
    optimizer.prepare_grads()
    if dist.get_rank() == culprit:
        assert optimizer._member.ready is not None
        ready, _ = optimizer._member.ready
        ready.updates[-1].grads[0].untyped_storage().resize_(0)
    before = [param.detach().clone() for param in bag.params]
    optimizer.step_with_ready_grads()
    unchanged = all(bits_equal(param.detach(), value) for param, value in zip(bag.params, before, strict=True))
    _backward(bag, optimizer, 3)
    with pytest.raises(MegascaleError) as caught:
        optimizer.step()
    return type(caught.value).__name__, str(caught.value), unchanged


def test_gradient_that_changes_before_its_update_is_every_ranks(ranks: RankPool) -> None:
    """Invariant 7: freed between prepare_grads() and step_with_ready_grads(); that rank updates nothing."""
    for culprit in range(2):
        for rank, (name, message, unchanged) in enumerate(ranks.run(2, _gradient_changes, "replicated", culprit)):
            assert name == GradientError.__name__
            assert message.startswith(f"rank {culprit}: the gradient of 'params.0' has lost its memory")
            assert unchanged == (rank == culprit)


def _chained(culprit: int) -> tuple[str, list[bool]]:
    torch.manual_seed(0)
    bag = Bag(torch.randn(shape).half() for shape in SHAPES)
    scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 3, 1)
    halves = [
        MixedPrecisionOptimizer(inner([(f"{i}", param)], lr=1e-2), None, scaler)
        for i, (inner, param) in enumerate(zip((torch.optim.RMSprop, torch.optim.AdamW), bag.params[:2], strict=True))
    ]
    chain = ChainedOptimizer(halves)
    for step in range(2):
        _backward(bag, chain, step)
        chain.step()
    before = bag[1].detach().clone()
    _switch_momentum_on(halves[0], culprit)
    _backward(bag, chain, 2)
    chain.step()
    moved = not bits_equal(bag[1].detach(), before)
    _backward(bag, chain, 3)
    with pytest.raises(InnerStepError) as caught:
        chain.step()
    return str(caught.value), [moved]


def test_later_members_of_a_chain_are_updated(ranks: RankPool) -> None:
    """Invariant 10: an error in the first member's own step() keeps no other member from its update."""
    for message, moved in ranks.run(2, _chained, 0):
        assert message.startswith("rank 0: RMSprop.step() raised KeyError")
        assert all(moved)
