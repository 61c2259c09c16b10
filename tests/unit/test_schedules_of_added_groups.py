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
    """The error tells both numbers; the schedule has not advanced."""
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
    with pytest.raises(
        UsageError, match=f"there were 2 param groups .*, now there are {3 if added else 1}; add groups"
    ):
        schedule.step(True)
    assert schedule.last_epoch == 0
