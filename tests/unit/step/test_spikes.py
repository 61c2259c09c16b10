"""Spikes of the gradient norm are skipped: ``grad_norm_skip_threshold``."""

import math
from typing import Any

import pytest
import torch

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.schedules import LandedLRScheduler
from tests.counting import OperatorCounter
from tests.training import INNER, Bag, bits_equal, model, same_bits, set_grads, snapshot, wrap


def _one_number(**options: Any) -> tuple[Bag, MixedPrecisionOptimizer]:
    """Return a parameter of one element, whose gradient is its own norm, and its optimizer."""
    bag = Bag([torch.zeros(1)])
    return bag, wrap(bag, INNER["sgd"], 2.0**4, **options)


def test_norms_above_the_threshold_are_skipped() -> None:
    """Megatron-Core skips norms that exceed it: one at the threshold lands, and is clipped as without it. The scale
    moves as if only overflows were skipped.
    """
    bag, optimizer = _one_number(grad_norm_skip_threshold=8.0, clip_grad=1.5)
    scaler = DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 4, 1)
    norms = [1.0, 8.0, 8.0078125, math.nan, 2.0**13, 0.0, 9.0, 1.25]
    for norm in norms:
        bag[0].grad = torch.tensor([norm]) * scaler.scale
        before = bag[0].item()
        result = optimizer.step()
        assert bool(result.success) == (norm <= 8.0)
        moved = before - bag[0].item()
        assert moved == pytest.approx(0.01 * min(norm, 1.5) if norm <= 8.0 else 0.0, abs=1e-6)
        scaler.update(math.isnan(norm))
        assert bits_equal(optimizer.get_loss_scale().reshape(1), scaler.scale)
    assert optimizer.num_skipped_steps.item() == 4


def _replicated(module: Any) -> Any:
    return wrap(module, INNER["adamw_fused"], 8.0, grad_norm_skip_threshold=100.0)


def _chained(module: Any) -> Any:
    named, scaler = list(module.named_parameters()), DynamicGradScaler(8.0)
    config = OptimizerConfig(fp16=True, grad_norm_skip_threshold=100.0)
    return ChainedOptimizer(
        [
            MixedPrecisionOptimizer(torch.optim.AdamW(part), config, scaler, grads_are_scaled=True)
            for part in (named[:3], named[3:])
        ]
    )


@pytest.mark.parametrize("build", [_replicated, _chained])
def test_spikes_change_nothing(build: Any) -> None:
    """A spike skips all members of a chain, keeps every bit, and delays a schedule."""
    module = model()
    optimizer = build(module)
    schedule = LandedLRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    set_grads(module, 0)
    assert optimizer.step().success
    schedule.step()
    before, rate = snapshot(optimizer, module), float(optimizer.param_groups[0]["lr"])
    set_grads(module, 6, 100.0)
    assert not optimizer.step().success
    assert same_bits(before, snapshot(optimizer, module))
    assert optimizer.num_skipped_steps.item() == 1
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == rate


@pytest.mark.native
def test_the_threshold_costs_no_arithmetic() -> None:
    """No host read, and one view more than without it, for any number of tensors: the decision compares."""
    counted = []
    for extra in ({}, {"grad_norm_skip_threshold": 8.0}):
        for count in (7, 100):
            module = Bag(torch.ones(3, dtype=torch.float16) for _ in range(count))
            optimizer = wrap(module, INNER["adamw_fused"], 8.0, clip_grad=1.0, backend="native", **extra)
            for step in range(3):
                set_grads(module, step)
                with OperatorCounter() as operators:
                    optimizer.step()
                assert operators.host_reads == 0
            counted.append(sum(operators.counts.values()))
    assert counted == [counted[0]] * 2 + [counted[0] + 1] * 2
