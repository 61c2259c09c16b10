"""Clipping that the caller chooses: another norm from step to step, and by value."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
    build_optimizer,
)
from megascale.errors import ArgumentError, ArgumentTypeError
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


# The keyword of the constructors


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).half()


def _inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.1)


Built = MixedPrecisionOptimizer | ChainedOptimizer
CONSTRUCTORS: dict[str, Callable[..., Built]] = {
    "MixedPrecisionOptimizer": lambda config, **clip: MixedPrecisionOptimizer(
        _inner(_model()), config, ConstantGradScaler(SCALE), **clip
    ),
    "DistributedOptimizer": lambda config, **clip: DistributedOptimizer(
        _inner(model := _model()), config, ConstantGradScaler(SCALE), modules=model, **clip
    ),
    "ChainedOptimizer": lambda config, **clip: ChainedOptimizer(
        [MixedPrecisionOptimizer(_inner(_model()), config, ConstantGradScaler(SCALE))], **clip
    ),
    "build_optimizer": lambda config, **clip: build_optimizer(
        replace(config or OptimizerConfig(fp16=True, clip_grad=0.0), lr=0.1), _model(), **clip
    ),
}


@pytest.mark.default("ChainedOptimizer")
@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_the_keyword_says_how_to_clip(constructor: str) -> None:
    """Of every constructor: the keyword decides; left out, the config does, and without a config nothing is clipped."""
    build = CONSTRUCTORS[constructor]
    config = OptimizerConfig(fp16=True, clip_grad=0.25)
    for given, expected in (
        ({"clip_grad": 1}, 1.0),
        ({"clip_grad": 0.0}, 0.0),
        ({}, 0.25),
        ({"clip_grad": None}, 0.25),
    ):
        assert build(config, **given).clip_grad == expected
    assert build(None).clip_grad == 0.0
    chosen = build(None, clip_grad=0.5)
    assert chosen.clip_grad == 0.5
    for wrong, error in ((-1, ArgumentError), (math.nan, ArgumentError), ("1", ArgumentTypeError)):
        with pytest.raises(error, match="clip_grad must be"):
            build(config, clip_grad=wrong)


# clip_grad_norm_


@pytest.mark.default("2.0-True", "inf-False", "1-True", "inf-True")
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("max_norm", [2.0, 1, math.inf])
def test_clip_grad_norm_clips_this_step(max_norm: float, chained: bool) -> None:
    """The step that follows has the bits of one under ``clip_grad``; the norm is unscaled; nothing is read."""
    results = []
    for by_method in (False, True):
        bag = _bag(torch.float16)
        own = 0.125 if by_method else (0.0 if max_norm == math.inf else max_norm)
        optimizer: Built = _sgd(bag, own, torch.float16)
        if chained:
            optimizer = ChainedOptimizer([_sgd(bag, own, torch.float16)])
        _set(bag)
        if by_method:
            with OperatorCounter() as counter:
                norm = optimizer.clip_grad_norm_(max_norm)
            assert counter.host_reads == 0
            assert norm.dtype == torch.float32
            assert norm.item() == pytest.approx(math.sqrt(sum(x * x for row in GRADS for x in row)), rel=1e-4)
            assert optimizer.clip_grad == 0.125  # as before
        result = optimizer.step()
        assert bool(result.success)
        results.append([main.clone() for _, main in optimizer.main_params()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
