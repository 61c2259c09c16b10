"""Gradients that the caller drops are freed."""

import gc
import weakref
from typing import Any

import pytest
import torch

from megascale.errors import InnerStepError
from tests.training import INNER, grad_of, model, set_grads, wrap


@pytest.mark.parametrize("inner", ["adamw_fused", "sgd", "lion"])
def test_step_keeps_no_gradient(inner: str) -> None:
    """After a step and zero_grad() no gradient is alive: the next backward makes new ones, which need the memory."""
    module = model(torch.float16)
    optimizer = wrap(module, INNER[inner])
    for seed in range(2):
        set_grads(module, seed)
        gradients = [weakref.ref(grad_of(param)) for param in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert not any(gradient() is not None for gradient in gradients)


@pytest.mark.parametrize("inner", ["adamw_fused", "muon"])
def test_an_update_that_fails_keeps_no_gradient(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error that says what to do. Where memory was short, gradients that the caller drops are freed."""
    module = model(torch.float16)
    muon = lambda module: torch.optim.Muon([("head", module.head.weight)])  # noqa: E731
    optimizer = wrap(module, INNER.get(inner, muon))
    set_grads(module, 0)
    gradients = [weakref.ref(grad_of(param)) for param in optimizer.param_groups[0]["params"]]
    for name in ("adam_", "unscale"):
        monkeypatch.setattr(type(optimizer._backend), name, _no_memory)
    with pytest.raises(InnerStepError, match="raised MemoryError: ; some main params may be updated and others not"):
        optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert not any(gradient() is not None for gradient in gradients)


def _no_memory(*_: Any) -> Any:
    raise MemoryError
