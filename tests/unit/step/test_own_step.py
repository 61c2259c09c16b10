"""Optimizers that run their own step() on main params: what they are shown, and what is put back."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import ConstantGradScaler, MixedPrecisionOptimizer
from tests.training import Bag, Sign, bits_equal, set_grads


class Plain(torch.optim.Optimizer):
    """A user-written optimizer without state. Where ``fails`` is set its step raises before it writes."""

    def __init__(self, params: Iterable[Any], lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})
        self.fails = False
        self.shown: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        self.shown = [p for group in self.param_groups for p in group["params"]]
        if self.fails:
            raise RuntimeError("out of paper")
        for p in self.shown:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def _mixed() -> Bag:
    return Bag([torch.ones(3).half(), torch.ones(2), torch.ones(4).half()])


def _wrapped(module: nn.Module, inner: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(inner, grad_scaler=ConstantGradScaler(8.0))


def test_optimizer_without_state_trains() -> None:
    """An optimizer that keeps no state updates fp32 main params of fp16 parameters, and fp32 parameters themselves."""
    module = _mixed()
    inner = Plain(module.parameters())
    optimizer = _wrapped(module, inner)
    grads = [torch.full_like(p, 8 * 2.0**-12) for p in module.params]
    for param, grad in zip(module.params, grads, strict=True):
        param.grad = grad
    assert optimizer.get_loss_scale() == 8
    assert optimizer.step().success
    assert [p.dtype for p in inner.shown] == [torch.float32] * 3
    # Half of 2**-12 is less than fp16 can take from 1.
    for _, main in optimizer.main_params():
        assert bits_equal(main, torch.full_like(main, 1 - 2.0**-13))
    assert not inner.state


@pytest.mark.parametrize("kind", [Plain, Sign])
def test_model_params_are_back_after_a_step(kind: type[Plain] | type[Sign]) -> None:
    """After a step the optimizer holds model params again: in groups, as keys of its state, with their gradients."""
    module = _mixed()
    inner = kind(module.parameters(), lr=0.5)
    optimizer = _wrapped(module, inner)
    for step in range(2):
        set_grads(module, seed=step)
        grads = [p.grad for p in module.params]
        optimizer.get_loss_scale()
        optimizer.step()
        assert all(held is p for held, p in zip(inner.param_groups[0]["params"], module.params, strict=True))
        assert all(p.grad is grad for p, grad in zip(module.params, grads, strict=True))
        assert all(main.grad is None or not p.is_copy for p in optimizer.live_state().main_params for main in [p.main])
        assert set(map(id, inner.state)) <= set(map(id, module.params))
    if kind is Sign:
        assert set(map(id, inner.state)) == set(map(id, module.params))


def test_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    """Where the optimizer's own step() fails, groups, state and gradients are those of the model again."""
    module = _mixed()
    inner = Plain(module.parameters())
    optimizer = _wrapped(module, inner)
    set_grads(module, seed=0)
    grads = [p.grad for p in module.params]
    inner.fails = True
    optimizer.get_loss_scale()
    with pytest.raises(RuntimeError, match="out of paper"):
        optimizer.step()
    assert all(held is p for held, p in zip(inner.param_groups[0]["params"], module.params, strict=True))
    assert all(p.grad is grad for p, grad in zip(module.params, grads, strict=True))
    inner.fails = False
    optimizer.get_loss_scale()
    assert optimizer.step().success
