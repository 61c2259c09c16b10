"""What a LandedLRScheduler refuses, by name, and what it does not pass on to the scheduler in it."""

import copy
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from megascale.errors import ArgumentError, ArgumentTypeError, StateDictError, UsageError
from megascale.schedules import LandedLRScheduler
from tests.unit.test_schedules import _bag, _inner, _step, _wrapped


def test_misuse() -> None:
    """Every misuse has an error that names it, and advances nothing."""
    optimizer = _wrapped(_inner(_bag()))
    bare = torch_lr.ExponentialLR(optimizer, 0.5)
    schedule = LandedLRScheduler(bare)
    other = _wrapped(_inner(_bag()))
    with pytest.raises(ArgumentTypeError, match="already"):
        LandedLRScheduler(schedule)
    with pytest.raises(ArgumentTypeError, match="metric"):
        LandedLRScheduler(torch_lr.ReduceLROnPlateau(optimizer))
    with pytest.raises(ArgumentTypeError, match="got int"):
        LandedLRScheduler(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="other param groups"):
        LandedLRScheduler(bare, other)
    with pytest.raises(ArgumentTypeError, match="got str"):
        LandedLRScheduler(bare, "optimizer")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no step of MixedPrecisionOptimizer"):
        schedule.step()
    _step(optimizer, False)
    with pytest.raises(ArgumentTypeError, match="got int"):
        schedule.step(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="opposite"):
        schedule.step(torch.tensor(0.0))
    with pytest.raises(ArgumentError, match="one element"):
        schedule.step(torch.tensor([True, False]))
    with pytest.raises(StateDictError, match="last_epoch"):
        schedule.load_state_dict({"gamma": 0.5})
    with pytest.raises(StateDictError, match="3 rates for 2 param groups"):
        schedule.load_state_dict(schedule.state_dict() | {"_last_lr": [1.0, 1.0, 1.0], "last_epoch": 5})
    with pytest.raises(StateDictError, match="must be a dict"):
        schedule.load_state_dict(3)  # type: ignore[arg-type]
    assert schedule.last_epoch == 0
    schedule.step()
    assert schedule.last_epoch == 1
    with pytest.raises(AttributeError):
        _ = schedule.no_such_thing


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
