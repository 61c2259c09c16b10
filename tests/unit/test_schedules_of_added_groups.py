"""A param group added or removed under a LandedLRScheduler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ExponentialLR

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from megascale.schedules import LandedLRScheduler


@pytest.mark.parametrize("added", [True, False])
def test_other_groups_than_the_schedule_was_built_for_are_refused(added: bool) -> None:
    """The error tells both numbers, each time; the schedule has not advanced, and another one goes on from there."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([{"params": [param]} for param in params[:2]], lr=0.5))
    schedule = LandedLRScheduler(ExponentialLR(optimizer, 0.5))
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    if added:
        optimizer.add_param_group({"params": [params[2]]})
    else:
        optimizer.param_groups.pop()
    for success in (None, None, True):  # the outcome that nobody took is there still
        with pytest.raises(
            UsageError, match=f"there were 2 param groups .*, now there are {3 if added else 1}; add groups"
        ):
            schedule.step(success)
    assert schedule.last_epoch == 0


SCHEDULES: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "a factor in each step": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "a factor in each second step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "a factor at milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [4, 6], 0.5),
    "a function of the step": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8)),
    "a warm-up, then a cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 8)],
        [3],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_is_built_anew_goes_on(kind: str) -> None:
    """What the error advises: after a group was added, the old group has the rates that it would have had, and the new
    one the same fractions of its own.
    """
    rates: list[list[float]] = []
    for adds in (False, True):
        params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD([{"params": params[:1]}], lr=0.5))
        schedule = LandedLRScheduler(SCHEDULES[kind](optimizer))
        seen: list[float] = []
        for step in range(8):
            if adds and step == 4:
                optimizer.add_param_group({"params": params[1:]})
                for group, first in zip(optimizer.param_groups, (0.5, 0.25), strict=True):
                    group["lr"] = first
                before, schedule = schedule, LandedLRScheduler(SCHEDULES[kind](optimizer))
                for _ in range(before.last_epoch):
                    schedule.step(True)
            seen.append(float(optimizer.param_groups[0]["lr"]))
            assert all(float(group["lr"]) == pytest.approx(seen[-1] / 2) for group in optimizer.param_groups[1:])
            schedule.step(True)
        rates.append(seen)
    assert rates[0] == pytest.approx(rates[1])
    assert len(set(rates[0])) > 2
