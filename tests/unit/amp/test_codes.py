"""megascale.amp and torch optimizers whose moments a dropped wrapper left as 8-bit codes."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.amp import GradScaler, optimizer_step
from megascale.errors import UsageError
from tests.training import Inner, bits_equal, model, set_grads

SECOND = {"exp_avg_sq_dtype": torch.uint8}
KINDS: dict[str, Inner] = {
    "adamw": lambda m: torch.optim.AdamW(m.named_parameters(), fused=True),
    "adam": lambda m: torch.optim.Adam(m.named_parameters()),
}


def _left(kind: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer whose wrapper was dropped after a step."""
    module = model(torch.float32)
    optimizer = KINDS[kind](module)
    _step_wrapped(module, optimizer, **{"exp_avg_dtype": torch.int8, **SECOND, **options})
    return module, optimizer


def _step_wrapped(module: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    wrapper = MixedPrecisionOptimizer(optimizer, OptimizerConfig(**options))
    set_grads(module, 0)
    assert wrapper.step().success
    del wrapper
    gc.collect()


def _loss(module: nn.Module) -> Tensor:
    loss: Tensor = module(torch.ones(8, 4)).square().mean()
    return loss


def _held(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    params = list(module.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    return [value.detach().clone() for value in (*params, *grads, *states)]


def _helped(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    optimizer_step(_loss(module), optimizer, scaler, 0.5)


def _stepped(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def _unscaled(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, GradScaler], object]] = {
    "optimizer_step": _helped,
    "step": _stepped,
    "unscale_": _unscaled,
    "no scaler": lambda module, optimizer, scaler: optimizer_step(_loss(module), optimizer, None),
    "torch's": lambda module, optimizer, scaler: optimizer_step(_loss(module), optimizer, torch.amp.GradScaler("cpu")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_a_dropped_wrapper_are_refused(kind: str, way: str) -> None:
    """They are named with the remedy before a parameter, gradient or state has changed, whatever scales; fp32 moments
    train on.
    """
    module, optimizer = _left(kind)
    before, scaler = _held(module, optimizer), GradScaler("cpu", init_scale=128.0)
    message = r"state of 'first.weight' in \w+ holds exp_avg as 8-bit codes, .*; wrap the optimizer again .*"
    with pytest.raises(UsageError, match=message):
        WAYS[way](module, optimizer, scaler)
    assert all(bits_equal(one, two) for one, two in zip(before, _held(module, optimizer), strict=True))
    _step_wrapped(module, optimizer)
    fresh = GradScaler("cpu", init_scale=128.0)
    assert optimizer_step(_loss(module), optimizer, fresh, 0.5).success


def test_codes_that_torch_has_cast_are_refused() -> None:
    """``load_state_dict`` of the torch optimizer casts codes to fp32, which would count as moments."""
    module, optimizer = _left("adam")
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
    with pytest.raises(UsageError, match="holds exp_avg as 8-bit codes"):
        optimizer_step(_loss(module), optimizer, GradScaler("cpu"))
