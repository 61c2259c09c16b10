"""The wrapped optimizer's own step() is refused as long as a wrapper is there."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from tests.training import INNER, Sign, bits_equal, constant, model, same_bits, set_grads, snapshot

KINDS: dict[str, Any] = INNER | {
    "sign": lambda m: Sign(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.named_parameters()),
}


@pytest.mark.default("adam_maximize", "sgd_maximize", "sgd", "adamw_fused")
@pytest.mark.parametrize("kind", KINDS)
def test_step_of_the_wrapped_optimizer_is_refused(kind: str) -> None:
    """It would update 16-bit parameters with scaled gradients: an error that names the wrapper's step, and no bit has
    changed. The wrapper's own step works before and after.
    """
    module = model()
    optimizer = constant(module, KINDS[kind], 8.0)
    for step in range(2):
        set_grads(module, step)
        assert optimizer.step().success
        before = snapshot(optimizer, module)
        with pytest.raises(UsageError, match=r"\.step\(\) was called, but a MixedPrecisionOptimizer wraps .* call the"):
            optimizer._inner.step()
        assert same_bits(before, snapshot(optimizer, module))


@pytest.mark.parametrize("kind", ["adamw_fused", "sign"])
def test_refusal_goes_with_the_wrapper(kind: str) -> None:
    """Invariant 11: once the wrapper is dropped the torch optimizer is torch's again, with no hook left on it."""
    module = model(torch.float32)
    inner = KINDS[kind](module)
    optimizer = constant(module, lambda _: inner, 1.0)
    gone = weakref.ref(optimizer)
    set_grads(module, 0)
    optimizer.step()
    del optimizer
    gc.collect()
    assert gone() is None
    assert not inner._optimizer_step_pre_hooks
    before = module.head.weight.detach().clone()
    inner.step()
    assert not bits_equal(before, module.head.weight.detach())


def test_hooks_and_schedulers_of_the_inner_optimizer_work() -> None:
    """A scheduler built on it patches its step(), a user's hooks run around it; neither hides or undoes the refusal."""
    module = model()
    inner = torch.optim.AdamW(module.named_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = constant(module, lambda _: inner, 8.0)
    calls: list[str] = []
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    inner.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(2):
        set_grads(module, step)
        optimizer.step()
        scheduler.step()
    assert calls == ["before", "after"] * 2
    assert inner.param_groups[0]["lr"] == 0.025
    with pytest.raises(UsageError, match=r"AdamW\.step\(\) was called"):
        inner.step()


@pytest.mark.parametrize("kind", ["adamw_fused", "sign"])
def test_schedulers_of_the_inner_optimizer_see_its_steps(kind: str) -> None:
    """Torch warns of a scheduler that steps before its optimizer has: here the wrapper's step counts."""
    module = model()
    inner = KINDS[kind](module)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = constant(module, lambda _: inner, 8.0)
    set_grads(module, 0)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@pytest.mark.parametrize("loss", [1.0, 3, None, [torch.ones(())]])
def test_loss_that_is_no_tensor_is_refused(loss: Any) -> None:
    """``scale_loss(1.0)``: named, whether there is a scaler or not; in a chain too."""
    module = nn.Linear(2, 2).half()
    for optimizer in (
        constant(module, INNER["sgd"], 8.0),
        MixedPrecisionOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters())),
    ):
        with pytest.raises(TypeError, match=r"loss must be a tensor with its graph, got .* of type \w+; scale what"):
            optimizer.scale_loss(loss)
