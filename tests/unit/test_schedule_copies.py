"""What a LandedLRScheduler does not pass on to the scheduler in it."""

import copy
from typing import Any

from torch.optim import lr_scheduler as torch_lr

from megascale.schedules import LandedLRScheduler
from tests.unit.test_schedules import _bag, _inner


class _CopiesItself(torch_lr.ExponentialLR):
    def __deepcopy__(self, memo: Any) -> str:
        return "a copy of its own making"


def test_copying_is_not_passed_on() -> None:
    """A copy of the wrapper is one, whatever its scheduler makes of itself; a bare instance has no attributes."""
    schedule = LandedLRScheduler(_CopiesItself(_inner(_bag()), 0.5))
    made = copy.deepcopy(schedule)
    assert isinstance(made, LandedLRScheduler)
    assert made.scheduler == "a copy of its own making"  # type: ignore[comparison-overlap]
    assert not hasattr(LandedLRScheduler.__new__(LandedLRScheduler), "last_epoch")
