"""Gradients of a loss that nobody has scaled are an error, wherever the scaler has a scale that matters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MegatronGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
)
from megascale.errors import ArgumentTypeError, UsageError
from megascale.integrations.lightning_scaling import PerBatchScaler
from tests.counting import OperatorCounter
from tests.training import Tiny, model, same_bits, set_grads, snapshot

Optimizer = MixedPrecisionOptimizer | ChainedOptimizer


def _dynamic(initial_scale: float = 1024.0) -> DynamicGradScaler:
    return DynamicGradScaler(initial_scale, 1.0, 2.0, 0.5, 2000, 1)


def _wrapped(module: Tiny, scaler: MegatronGradScaler | None, **options: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(torch.optim.AdamW(module.named_parameters()), None, scaler, **options)


def _sharded(module: Tiny) -> MixedPrecisionOptimizer:
    return DistributedOptimizer(torch.optim.AdamW(module.named_parameters()), None, _dynamic(), modules=module)


def _chain(module: Tiny) -> ChainedOptimizer:
    scaler = _dynamic()
    named = list(module.named_parameters())
    return ChainedOptimizer(
        [MixedPrecisionOptimizer(torch.optim.AdamW(part), None, scaler) for part in (named[:3], named[3:])]
    )


KINDS: dict[str, Callable[[Tiny], Optimizer]] = {
    "replicated": lambda module: _wrapped(module, _dynamic()),
    "at_scale_1": lambda module: _wrapped(module, _dynamic(1.0)),  # it will grow, and nobody would know
    "constant": lambda module: _wrapped(module, ConstantGradScaler(8.0)),
    "sharded": _sharded,
    "chained": _chain,
    "built": lambda module: build_optimizer(OptimizerConfig(fp16=True, lr=1e-3), module),
}


def _backward(module: Tiny, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    loss_of(module(torch.ones(2, 4, dtype=torch.float16)).float().square().mean()).backward()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_that_nobody_scaled_is_refused(kind: str) -> None:
    """Invariant 12: plain ``loss.backward()``: an error with the remedy, at the step, before anything has changed."""
    module = model()
    optimizer = KINDS[kind](module)
    for _ in range(2):  # a scaled step between two that are not
        _backward(module, lambda loss: loss)
        before = {name: param.detach().clone() for name, param in module.named_parameters()}
        scale = optimizer.state_dict()["grad_scaler"]
        with pytest.raises(UsageError, match=r"the loss was not scaled: neither .* optimizer.scale_loss\(loss\)"):
            optimizer.step()
        assert same_bits(before, {name: param.detach() for name, param in module.named_parameters()})
        assert optimizer.state_dict()["grad_scaler"] == scale
        optimizer.zero_grad()
        _backward(module, optimizer.scale_loss)
        assert optimizer.step().success
        optimizer.zero_grad()


@pytest.mark.parametrize("half", ["prepare_grads", "step"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda optimizer: optimizer.scale_loss(torch.ones(())),
        lambda optimizer: optimizer.get_loss_scale(),
        lambda optimizer: optimizer.grad_scaler.scale,
    ],
)
def test_whoever_asks_for_the_scale_may_step(ask: Callable[[Any], Any], half: str) -> None:
    """Each way to learn the scale counts, once."""
    module = model()
    optimizer = _wrapped(module, _dynamic())
    for step in range(2):
        set_grads(module, step)
        ask(optimizer)
        getattr(optimizer, half)()
        optimizer.zero_grad()
    set_grads(module, 2)
    with pytest.raises(UsageError, match="the loss was not scaled"):
        getattr(optimizer, half)()


def test_what_is_not_judged() -> None:
    """No scaler, a constant scale of 1, and gradients that the caller vouches for."""
    for scaler, dtype, options in (
        (None, torch.bfloat16, {}),
        (ConstantGradScaler(1.0), torch.float16, {}),
        (_dynamic(), torch.float16, {"grads_are_scaled": True}),
    ):
        module = model(dtype)
        optimizer = _wrapped(module, scaler, **options)
        set_grads(module, 0)
        assert optimizer.step().success
    with pytest.raises(ArgumentTypeError, match="grads_are_scaled must be True or False, got 1"):
        _wrapped(model(), _dynamic(), grads_are_scaled=1)


def test_optimizers_that_step_apart_share_one_question() -> None:
    """Two optimizers with one scaler, as of a GAN: one loss, scaled once, serves a step of each."""
    scaler = _dynamic()
    modules = [model(), model()]
    first, second = (_wrapped(module, scaler) for module in modules)
    first.grad_scaler = second.grad_scaler = PerBatchScaler(scaler)  # as Lightning's plugin does
    for step in range(2):
        for module in modules:
            set_grads(module, step)
        first.scale_loss(torch.ones(()))
        assert first.step().success
        assert second.step().success
    with pytest.raises(UsageError, match="the loss was not scaled"):
        second.step()


def test_nothing_is_read_from_the_device() -> None:
    """Invariant 5 holds: who has asked is known on the host."""
    module = model()
    optimizer = _wrapped(module, _dynamic())
    before = snapshot(optimizer, module)
    set_grads(module, 0)
    with OperatorCounter() as counter, pytest.raises(UsageError, match="the loss was not scaled"):
        optimizer.step()
    assert counter.host_reads == 0
    assert same_bits(before, snapshot(optimizer, module))
