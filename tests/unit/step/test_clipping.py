"""Clipping that the caller chooses: another norm from step to step, and by value."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import ChainedOptimizer, ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig, ParallelGroups
from megascale.errors import ArgumentError, UsageError
from tests.counting import OperatorCounter
from tests.training import Bag, grad_of, same_bits, snapshot

SCALE = 256.0
GRADS = [[0.5, -2.0, 3.0, 0.0], [1e-3, -4.0]]


def _sgd(bag: nn.Module, clip_grad: float, dtype: torch.dtype) -> MixedPrecisionOptimizer:
    config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, clip_grad=clip_grad)
    inner = torch.optim.SGD(bag.named_parameters(), lr=1.0)
    return MixedPrecisionOptimizer(
        inner, config, ConstantGradScaler(SCALE), groups=ParallelGroups(), grads_are_scaled=True
    )


def _bag(dtype: torch.dtype) -> Bag:
    return Bag([torch.zeros(4, dtype=dtype), torch.zeros(2, dtype=dtype)])


def _set(bag: Bag, grads: list[list[float]] = GRADS) -> None:
    for param, values in zip(bag.parameters(), grads, strict=True):
        param.grad = (torch.tensor(values) * SCALE).to(param.dtype)


def _updates(optimizer: MixedPrecisionOptimizer) -> Tensor:
    """Return minus the sum of all updates, which SGD with lr=1 makes of its gradients."""
    return -torch.cat([main.detach().clone() for _, main in optimizer.main_params()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clip_grad", [0.0, 2.0])
def test_clip_by_value_equals_torch_in_fp32(dtype: torch.dtype, clip_grad: float) -> None:
    """The same as unscaling by hand, clip_grad_norm_ and then clip_grad_value_, without a host read."""
    bag = _bag(dtype)
    optimizer = _sgd(bag, clip_grad, dtype)
    _set(bag)
    reference = [nn.Parameter(torch.zeros_like(p, dtype=torch.float32)) for p in bag.parameters()]
    for mine, param in zip(reference, bag.parameters(), strict=True):
        mine.grad = grad_of(param).float() / SCALE
    if clip_grad:
        torch.nn.utils.clip_grad_norm_(reference, clip_grad)
    torch.nn.utils.clip_grad_value_(reference, 0.75)
    optimizer.prepare_grads()
    with OperatorCounter() as counter:
        optimizer.clip_grad_value_(0.75)
    assert counter.host_reads == 0
    optimizer.step_with_ready_grads()
    expected = torch.cat([grad_of(p) for p in reference])
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps  # of the bound, in the gradient's dtype
    torch.testing.assert_close(_updates(optimizer), expected, rtol=rounding + 1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_clip_by_value_hides_no_overflow(bad: float) -> None:
    """A step with a non-finite gradient is skipped, though a clamp would make it finite."""
    bag = _bag(torch.float16)
    optimizer = _sgd(bag, 1.0, torch.float16)
    before = snapshot(optimizer, bag)
    _set(bag, [[1.0, bad, 0.0, 0.0], [1.0, 1.0]])
    assert optimizer.prepare_grads() == 1
    optimizer.clip_grad_value_(1.0)
    assert not optimizer.step_with_ready_grads().success
    assert same_bits(before, snapshot(optimizer, bag))


def test_clip_norm_may_change_between_steps() -> None:
    """`clip_grad` starts as the config's and counts from the next step on; ChainedOptimizer sets it for all."""
    bag = _bag(torch.float32)
    optimizer = _sgd(bag, 1.0, torch.float32)
    chain = ChainedOptimizer([optimizer])
    norms = []
    for clip in (None, 0.5, 0.0):
        if clip is not None:
            chain.clip_grad = clip
        before = _updates(optimizer)
        _set(bag)
        norm = chain.step().grad_norm
        norms.append((_updates(optimizer) - before).norm().item())
    assert norms == pytest.approx([1.0, 0.5, norm.item()], rel=1e-5)
    assert chain.clip_grad == optimizer.clip_grad == 0.0


def test_misuse_is_refused() -> None:
    """Errors name the argument or the order of calls."""
    optimizer: Any = _sgd(_bag(torch.float16), 1.0, torch.float16)
    with pytest.raises(UsageError, match=r"prepare_grads\(\) first"):
        optimizer.clip_grad_value_(1.0)
    with pytest.raises(ArgumentError, match="max_value must be above 0, got 0"):
        optimizer.clip_grad_value_(0)
    with pytest.raises(ArgumentError, match="clip_grad must be 0 or more, got -1"):
        optimizer.clip_grad = -1
