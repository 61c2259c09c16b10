"""optimizer_step with torch's fused Adam: on our kernels where that changes nothing else, else through its step()."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from megascale.amp import GradScaler, fused_adam, optimizer_step
from megascale.kernels import TorchBackend, select_backend
from tests.counting import OperatorCounter
from tests.training import Tiny, bits_equal, model

BACKEND = select_backend()
CLIP = 0.5
TORCHS_KERNELS = {torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adamw_.default}
pytestmark = pytest.mark.skipif(type(BACKEND) is TorchBackend, reason="no kernels here but torch's")

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _adam(**options: Any) -> Make:
    return lambda module: torch.optim.Adam(module.parameters(), **({"lr": 1e-2, "fused": True} | options))


def _adamw(**options: Any) -> Make:
    return lambda module: torch.optim.AdamW(module.parameters(), **({"lr": 1e-2, "fused": True} | options))


def _two_groups(module: nn.Module) -> torch.optim.Optimizer:
    first, *rest = module.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 1e-3}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


ON_KERNELS: dict[str, Make] = {
    "adamw": _adamw(),
    "adam": _adam(weight_decay=0.1),
    "amsgrad": _adamw(amsgrad=True),
    "maximize": _adam(maximize=True),
    "lr tensor": _adamw(lr=torch.tensor(1e-2)),
    "two groups": _two_groups,
}


def _loss(module: Tiny, step: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    hidden = module.norm(module.first(x))  # the other layers have no gradient before step 2
    loss: Tensor = (module.head(module.second(hidden)) if step >= 2 else hidden).square().mean()
    return loss * math.inf if step in (0, 4) else loss


def _by_torch(module: Tiny, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, step: int) -> None:
    optimizer.zero_grad()
    scaler.scale(_loss(module, step)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", ON_KERNELS)
def test_equals_torchs_kernel(kind: str) -> None:
    """Within a few ulp, with an overflow at the first step, parameters without gradients, and a state loaded midway."""
    mine, other = model(torch.float32), model(torch.float32)
    ours, theirs = ON_KERNELS[kind](mine), ON_KERNELS[kind](other)
    scaler, torchs = GradScaler("cpu", init_scale=2.0**10), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(8):
        with OperatorCounter() as counter:
            optimizer_step(_loss(mine, step), ours, scaler, CLIP)
        assert not TORCHS_KERNELS & counter.counts.keys()
        assert counter.host_reads == 0
        _by_torch(other, theirs, torchs, step)
        assert scaler.get_scale() == torchs.get_scale()
        if step == 5:
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    for left, right in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
        assert ours.state[left].keys() == theirs.state[right].keys()
        assert bits_equal(ours.state[left]["step"], theirs.state[right]["step"])
        for name, value in theirs.state[right].items():
            torch.testing.assert_close(ours.state[left][name], value, rtol=1e-4, atol=1e-7)


def _hooked(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = _adamw()(module)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _replaced(module: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = _adamw()(module)
    inner = optimizer.step
    optimizer.step = lambda *args: inner(*args)
    replaced: torch.optim.Optimizer = optimizer
    return replaced


class _Own(torch.optim.AdamW):
    """A subclass may have a step() of its own."""


DETOURS: dict[str, Make] = {
    "hooks": _hooked,
    "step replaced": _replaced,
    "subclass": lambda module: _Own(module.parameters(), fused=True),
    "beta tensors": _adamw(betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "fp64": lambda module: torch.optim.AdamW(module.double().parameters(), fused=True),
}


@pytest.mark.parametrize("kind", DETOURS)
def test_runs_its_own_step_where_that_may_do_more(kind: str) -> None:
    """Hooks, a replaced step(), a subclass, and what the kernels do not know: torch's step() is called."""
    module = model(torch.float32)
    optimizer = DETOURS[kind](module)
    assert not fused_adam.fits(optimizer, BACKEND)
    dtype = next(module.parameters()).dtype
    with OperatorCounter() as counter:
        result = optimizer_step(module(torch.ones(2, 4, dtype=dtype)).sum(), optimizer, GradScaler("cpu"), CLIP)
    assert result.success
    assert TORCHS_KERNELS & counter.counts.keys()


def test_global_hooks_are_called() -> None:
    """A hook for every optimizer of the process counts, too."""
    calls: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *given: calls.append(given))
    module = model(torch.float32)
    try:
        optimizer_step(_loss(module, 2), _adamw()(module), GradScaler("cpu"), CLIP)
    finally:
        handle.remove()
    assert len(calls) == 1


def test_learning_rate_schedulers_notice_the_step() -> None:
    """A scheduler wraps step(), and warns where it was not called: it sees that the optimizer has stepped."""
    module = model(torch.float32)
    optimizer = _adamw()(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    assert fused_adam.fits(optimizer, BACKEND)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_step(_loss(module, 2), optimizer, GradScaler("cpu"), CLIP)
        scheduler.step()
    assert scheduler.get_last_lr() == [5e-3]
