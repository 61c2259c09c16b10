"""A param group added under a LandedLRScheduler: it follows the schedule, or the schedule is refused by name."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_lr
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from megascale import MixedPrecisionOptimizer
from megascale.errors import UsageError
from megascale.schedules import LandedLRScheduler

Make = Callable[[torch.optim.Optimizer], LRScheduler]

# After two landed steps a group joins at 0.2; its rates for the next steps, as the schedule's rule has them.
FOLLOWED: dict[str, tuple[Make, list[float]]] = {
    "lambda": (lambda o: torch_lr.LambdaLR(o, lambda epoch: 1 / (1 + epoch)), [0.2 / 4, 0.2 / 5]),
    "multiplicative": (lambda o: torch_lr.MultiplicativeLR(o, lambda _: 0.5), [0.1, 0.05]),
    "step": (lambda o: torch_lr.StepLR(o, 3), [0.02, 0.02]),
    "multi_step": (lambda o: torch_lr.MultiStepLR(o, [3, 4]), [0.02, 0.002]),
    "linear": (lambda o: torch_lr.LinearLR(o, 0.5, total_iters=4), [0.2 * 0.875 / 0.75, 0.2 / 0.75]),
    "constant": (lambda o: torch_lr.ConstantLR(o, 0.5, 3), [0.4, 0.4]),
    "exponential": (lambda o: torch_lr.ExponentialLR(o, 0.9), [0.18, 0.162]),
    "polynomial": (lambda o: torch_lr.PolynomialLR(o, 8), [0.2 * 5 / 6, 0.2 * 4 / 6]),
    "warm_restarts": (lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 2), [0.1, 0.2]),
    "sequential": (
        lambda o: torch_lr.SequentialLR(
            o, [torch_lr.LinearLR(o, 0.1, total_iters=3), torch_lr.ExponentialLR(o, 0.5)], [3]
        ),
        [0.2, 0.1],
    ),
    "chained": (
        lambda o: torch_lr.ChainedScheduler([torch_lr.ExponentialLR(o, 0.5), torch_lr.ExponentialLR(o, 0.5)]),
        [0.05, 0.0125],
    ),
}
REFUSED: dict[str, tuple[Make, str]] = {
    "one_cycle": (lambda o: torch_lr.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False), "OneCycleLR.* bounds"),
    "cyclic": (lambda o: torch_lr.CyclicLR(o, 0.1, 0.2, cycle_momentum=False), "CyclicLR was built, which has bounds"),
    "swa": (lambda o: SWALR(o, 0.02, 5), "SWALR was built, which has bounds"),
    "lambda_per_group": (
        lambda o: torch_lr.LambdaLR(o, [lambda _: 1.0, lambda epoch: 0.9**epoch]),
        "LambdaLR was built, which has functions for each group",
    ),
}


def _step(optimizer: torch.optim.Optimizer, schedule: LRScheduler, skip: bool = False) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, math.inf if skip else 0.5)
    result = optimizer.step()
    schedule.step(result.success) if isinstance(schedule, LandedLRScheduler) else schedule.step()  # type: ignore[attr-defined]


def _groups() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in (0.1, 0.3)])


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("name", FOLLOWED)
def test_an_added_group_follows(name: str, skipped: bool) -> None:
    """From the rate that it comes with; the others' are what they were. It was an IndexError.

    ``skipped``: the step before the group joins is skipped, which the host learns after it has joined.
    """
    make, expected = FOLLOWED[name]
    optimizer, plain = MixedPrecisionOptimizer(_groups()), _groups()
    schedule, oracle = LandedLRScheduler(make(optimizer)), make(plain)
    for skip in [False, False] + [True] * skipped:
        _step(optimizer, schedule, skip)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.2})
    for _ in range(2):
        _step(plain, oracle)
    for rate in expected:
        _step(optimizer, schedule)
        _step(plain, oracle)
        assert [float(lr) for lr in schedule.get_last_lr()] == [*map(float, oracle.get_last_lr()), pytest.approx(rate)]
    assert len(schedule.state_dict()["_last_lr"]) == 3


@pytest.mark.parametrize("name", REFUSED)
def test_schedules_that_know_their_groups_one_by_one_are_named(name: str) -> None:
    """Bounds and functions that were given by group say nothing of another one."""
    make, message = REFUSED[name]
    optimizer = MixedPrecisionOptimizer(_groups())
    schedule = LandedLRScheduler(make(optimizer))
    _step(optimizer, schedule)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.2})
    with pytest.raises(UsageError, match=rf"param group 2 was added after the {message}"):
        _step(optimizer, schedule)
