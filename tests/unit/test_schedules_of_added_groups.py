"""A param group added or removed under a LandedLRScheduler."""

import pytest
import torch
from torch import nn
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
    for group in optimizer.param_groups:
        group["initial_lr"] = 0.5
    anew = LandedLRScheduler(ExponentialLR(optimizer, 0.5, last_epoch=schedule.last_epoch - 1))
    anew.step(True)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25] * len(optimizer.param_groups)
    anew = LandedLRScheduler(ExponentialLR(optimizer, 0.5, last_epoch=anew.last_epoch - 1))
    anew.step(True)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.125] * len(optimizer.param_groups)
