"""Gradients that the caller drops are freed."""

import weakref

import pytest
import torch

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
