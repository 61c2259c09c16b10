"""StepGraph where there is no GPU: what it refuses, and the rehearsal that precedes a capture."""

from typing import Any

import pytest
import torch

from megascale import ConstantGradScaler, DistributedOptimizer, MixedPrecisionOptimizer, StepGraph
from megascale.errors import UsageError
from megascale.grad_sync import GradSync
from tests.training import INNER, Sign, grad_of, model, same_bits, set_grads, snapshot, wrap


def _hooked() -> MixedPrecisionOptimizer:
    optimizer = wrap(model())
    optimizer._inner.register_step_post_hook(lambda *_: None)
    return optimizer


def _gathers_late() -> MixedPrecisionOptimizer:
    module = model()
    inner = torch.optim.AdamW(module.named_parameters())
    return DistributedOptimizer(inner, None, ConstantGradScaler(2.0), modules=module, overlap_param_gather=True)


REFUSED: list[tuple[Any, str]] = [
    (lambda: wrap(model()), r"on cpu, which has no graphs: move the model to a GPU"),
    (
        lambda: wrap(model(), lambda m: Sign(m.named_parameters())),
        r"must read the decision for Sign, which runs its own step",
    ),
    (_hooked, r"AdamW has step hooks"),
    (_gathers_late, r"overlap_param_gather=True lets a gather run out of the graph"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_captured_is_refused_with_the_reason(make: Any, message: str) -> None:
    """A clear error before anything has run, and nothing has changed."""
    optimizer = make()
    rate = optimizer.param_groups[0]["lr"]
    with pytest.raises(UsageError, match=message):
        StepGraph(optimizer, lambda: None)
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.default("sgd_dampening-reference", "adamw_fused-torch", "lion-native", "adamw_fused-reference")
@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
@pytest.mark.parametrize("inner", ["adamw_fused", "sgd_dampening", "lion"])
def test_rehearsal_changes_nothing(inner: str, backend: str) -> None:
    """A rehearsed step, of clean gradients or not, changes no bit of model, main params, state, scale or count."""
    module = model()
    optimizer = wrap(module, INNER[inner], backend=backend, clip_grad=1.0)
    for poison in (False, True):
        set_grads(module, 0, 1024.0)
        if poison:
            grad_of(module.first.weight)[0, 0] = torch.inf
        before, scaler = snapshot(optimizer, module), optimizer.state_dict()["grad_scaler"]
        optimizer._recipe.rehearse()
        assert same_bits(before, snapshot(optimizer, module))
        assert optimizer.state_dict()["grad_scaler"] == scaler
        assert optimizer.num_skipped_steps.item() == 0


def test_step_alone_needs_gradients_that_lie_still() -> None:
    """With our own reduction the gradients come from backward: it has to be part of the graph."""
    module = model()
    sync = GradSync(module.named_parameters())
    inner = torch.optim.AdamW(module.named_parameters())
    optimizer = MixedPrecisionOptimizer(inner, None, ConstantGradScaler(2.0), grad_sync=sync)
    assert optimizer._reduces_in_backward
    assert not wrap(model())._reduces_in_backward
