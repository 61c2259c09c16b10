"""Options of a param group are read again where they may have changed: numbers are kept, what can be written is not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError
from megascale.step.grad_stats import Holders
from tests.training import bits_equal

Change = Callable[[dict[str, Any]], object]


def _stepped(betas: Any, lr: Any, change: Change) -> torch.Tensor:
    """Return a parameter after each of three steps, shape [3, 8]. An option changes before the last."""
    param = nn.Parameter(torch.linspace(-1, 1, 8))
    inner = torch.optim.AdamW([param], lr=lr, betas=betas, foreach=False)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig())
    group, seen = inner.param_groups[0], []
    group["betas"] = betas  # torch's constructor makes a tuple of a list
    for step in range(3):
        if step == 2:
            change(group)
        param.grad = torch.arange(8.0) - 3 * step
        optimizer.step()
        seen.append(param.detach().clone())
    return torch.stack(seen)


def _nothing(group: dict[str, Any]) -> None:
    """Change no option."""


CHANGES = [{"lr": 0.5}, {"betas": (0.5, 0.6)}, {"maximize": True}, {"decoupled_weight_decay": False}, {"eps": 0.5}]


@pytest.mark.parametrize("change", CHANGES)
def test_a_new_value_takes_effect(change: dict[str, Any]) -> None:
    """At the next step, and not before."""
    kept = _stepped((0.9, 0.99), 0.1, _nothing)
    changed = _stepped((0.9, 0.99), 0.1, lambda group: group.update(change))
    assert bits_equal(kept[:2], changed[:2])
    assert not bits_equal(kept[2:], changed[2:])


def test_what_is_written_in_place_takes_effect() -> None:
    """A list of betas, and a learning rate in a tensor: the same objects with other values."""
    kept = _stepped([0.9, 0.99], torch.tensor(0.1), _nothing)
    changes: list[Change] = [lambda group: group["betas"].reverse(), lambda group: group["lr"].mul_(2)]
    for change in changes:
        changed = _stepped([0.9, 0.99], torch.tensor(0.1), change)
        assert bits_equal(kept[:2], changed[:2])
        assert not bits_equal(kept[2:], changed[2:])


def test_options_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are the same numbers, the hyperparameters of the first step serve."""
    param = nn.Parameter(torch.ones(8))
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW([param], lr=0.1))
    update: Any = optimizer._member.update
    counted, read = list[float](), update.hyper

    def counting(options: dict[str, Any]) -> Any:
        counted.append(options["lr"])
        return read(options)

    monkeypatch.setattr(update, "hyper", counting)
    for _ in range(4):
        param.grad = torch.ones(8)
        optimizer.step()
    assert counted == [0.1]
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()
    assert counted == [0.1, 0.2]


def test_weights_of_statistics_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many ranks hold a gradient is asked once, whichever of the parameters have one in a step."""
    params = [nn.Parameter(torch.ones(8)) for _ in range(3)]
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=0.1))
    asked, ask = list[nn.Parameter](), Holders.of

    def counting(holders: Holders, param: nn.Parameter) -> Any:
        asked.append(param)
        return ask(holders, param)

    def step(trained: list[nn.Parameter]) -> int:
        asked.clear()
        optimizer.zero_grad()
        for param in trained:
            param.grad = torch.ones(8)
        optimizer.step()
        return len(asked)

    monkeypatch.setattr(Holders, "of", counting)
    assert [step(params), step(params), step(params[1:]), step(params[1:]), step(params)] == [3, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "change", [{"lr": math.nan}, {"lr": 10**400}, {"betas": (math.inf, 0.9)}, {"weight_decay": -math.inf}]
)
def test_what_is_not_finite_is_refused(change: dict[str, Any]) -> None:
    """A schedule that divides by zero would make every parameter NaN: the step raises before a bit has changed."""
    param = nn.Parameter(torch.linspace(-1, 1, 8))
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW([param], lr=0.1), OptimizerConfig())
    before = param.detach().clone()
    optimizer.param_groups[0].update(change)
    param.grad = torch.arange(8.0)
    with pytest.raises(
        ArgumentError, match=f"{next(iter(change))} of a param group must be (finite|within the range of a float)"
    ):
        optimizer.step()
    assert bits_equal(param.detach(), before)
    optimizer.param_groups[0].update(lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    assert optimizer.step().success
