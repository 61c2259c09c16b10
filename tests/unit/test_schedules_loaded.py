"""State that is loaded into a LandedLRScheduler in the middle of training, and what is asked of it after a skip."""

import warnings

from torch.optim import lr_scheduler as torch_lr

from megascale.schedules import LandedLRScheduler
from tests.unit.test_schedules import SCHEDULES, _bag, _inner, _Oracle, _step, _wrapped


def test_what_is_asked_or_loaded_after_a_skip() -> None:
    """get_lr() knows of the skip before it; a loaded state is not undone by it."""
    optimizer = _wrapped(_inner(_bag()))
    schedule, oracle = LandedLRScheduler(SCHEDULES["lambda"](optimizer)), _Oracle(SCHEDULES["lambda"], _inner)
    saved = schedule.state_dict()
    for skip in (False, True):
        schedule.step(_step(optimizer, skip))
        oracle.step(skip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants get_last_lr() there
        assert schedule.get_lr() == oracle.schedule.get_lr()
    schedule.step(_step(optimizer, True))
    schedule.load_state_dict(saved)
    schedule.step(_step(optimizer, False))
    assert schedule.last_epoch == 1


def test_rates_of_groups_count_more_than_loaded_ones() -> None:
    """Where only the schedule's state was loaded, it goes on from the rates that the groups hold, as torch's own do."""
    optimizer = _wrapped(_inner(_bag()))
    schedule = LandedLRScheduler(torch_lr.ExponentialLR(optimizer, 0.5))
    schedule.step(_step(optimizer, False))
    schedule.load_state_dict(schedule.state_dict() | {"_last_lr": [0.7, 0.1]})
    schedule.step(_step(optimizer, False))
    assert schedule.get_last_lr() == [0.0025, 0.00075]
