"""What a LandedLRScheduler takes back after a skipped step: what its own advance has changed."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from megascale.schedules import LandedLRScheduler
from tests.cells import Cell, integers
from tests.pool import RankPool
from tests.unit.test_schedules import SCHEDULES, _bag, _inner, _inner_for, _options, _Oracle, _step, _wrapped

WRITTEN = {"weight_decay": 0.03125, "eps": 2.0**-20, "dampening": 0.25, "nesterov": True}


def _overwritten(options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return values for the options that no schedule of that name changes."""
    moving = {"one_cycle_momentum": {"betas"}, "cyclic_momentum": {"momentum"}}.get(name, set())
    own = WRITTEN | {"betas": (0.5, 0.75), "momentum": 0.5}
    own.pop("nesterov" if options.get("dampening", 0) == 0 else "dampening")
    return {key: value for key, value in own.items() if key in options and key not in moving}


@pytest.mark.default(
    "cyclic_momentum-load_state_dict", "lambda-program", "step-load_state_dict", "cyclic-load_state_dict"
)
@pytest.mark.parametrize("how", ["program", "load_state_dict"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_options_that_others_set_stay(name: str, how: str) -> None:
    """Set after a skipped step, by the program or by a load, every option but the rate was put back a step later."""
    inner = _inner_for(name)
    optimizer = _wrapped(inner(_bag()))
    schedule, oracle = LandedLRScheduler(SCHEDULES[name](optimizer)), _Oracle(SCHEDULES[name], inner)
    for step, skip in enumerate((False, True, True, False, True, False)):
        schedule.step(_step(optimizer, skip))
        oracle.step(skip)
        if step in (1, 4):
            new = [_overwritten(group, name) for group in optimizer.param_groups]
            if step == 4:
                new = [{key: value for key, value in one.items() if key in ("weight_decay", "eps")} for one in new]
                new = [{key: value / 2 for key, value in one.items()} for one in new]
            if how == "program":
                for group, own in zip(optimizer.param_groups, new, strict=True):
                    group.update(own)
            else:
                state = optimizer.state_dict()
                for group, own in zip(state["optimizer"]["param_groups"], new, strict=True):
                    group.update(own)
                optimizer.load_state_dict(state)
            for group, own in zip(oracle.optimizer.param_groups, new, strict=True):
                group.update(own)
        assert _options(optimizer) == _options(oracle.optimizer)


ATTRIBUTES: dict[str, tuple[str, Any]] = {
    "cosine": ("T_max", 9),
    "exponential": ("gamma", 0.5),
    "step": ("step_size", 2),
    "multi_step": ("gamma", 0.5),
    "linear": ("total_iters", 11),
    "constant": ("total_iters", 6),
    "polynomial": ("power", 2.5),
    "warm_restarts": ("T_mult", 3),
    "one_cycle": ("total_steps", 41),
    "cyclic": ("step_ratio", 0.25),
    "lambda": ("base_lrs", [0.25, 0.5]),
    "swa": ("anneal_epochs", 7) if hasattr(torch.optim.swa_utils.SWALR, "anneal_epochs") else ("_anneal_epochs", 7),
    "one_cycle_momentum": ("total_steps", 41),
    "cyclic_momentum": ("step_ratio", 0.25),
    "sequential": ("_milestones", [5]),
    "lambda_per_group": ("base_lrs", [0.25, 0.5]),
    "chained": ("verbose_name", "mine"),
    "multiplicative": ("last_epoch", 7),
}


@pytest.mark.default("swa", "warm_restarts", "one_cycle", "linear")
@pytest.mark.parametrize("name", SCHEDULES)
def test_attributes_reach_the_schedule_and_stay(name: str) -> None:
    """Set on the wrapper, also after a skipped step, they are the schedule's, and are not taken back."""
    inner = _inner_for(name)
    optimizer = _wrapped(inner(_bag()))
    schedule, oracle = LandedLRScheduler(SCHEDULES[name](optimizer)), _Oracle(SCHEDULES[name], inner)
    attribute, value = ATTRIBUTES[name]
    for step, skip in enumerate((False, True, False, True, True, False, False)):
        schedule.step(_step(optimizer, skip))
        oracle.step(skip)
        if step == 3:
            setattr(schedule, attribute, value)
            setattr(oracle.schedule, attribute, value)
            assert getattr(schedule, attribute) == getattr(schedule.scheduler, attribute) == value
        assert [float(group["lr"]) for group in optimizer.param_groups] == [
            g["lr"] for g in oracle.optimizer.param_groups
        ]
    assert schedule.state_dict() == oracle.schedule.state_dict()


class _Users(torch_lr.LRScheduler):
    """A schedule of a user's own, with state that it uses up and adds to, and one that decays weight decay."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, decays: bool) -> None:
        self.decays, self.factors, self.seen = decays, {1: 0.5, 2: 0.25, 3: 2.0}, dict[int, int]()
        self.history, self.table = np.zeros(8), torch.zeros(8)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.seen[self.last_epoch] = len(self.factors)
        self.history[self.last_epoch] += 1
        self.table[self.last_epoch] += 1
        factor = self.factors.pop(self.last_epoch, 1.0)
        if self.decays:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = np.float32(group["weight_decay"] * 0.5)
        return [group["lr"] * factor for group in self.optimizer.param_groups]


@pytest.mark.parametrize("decays", [False, True])
def test_a_schedule_of_ones_own(decays: bool) -> None:
    """Entries that a skipped advance added go, and those that it took away come back, of dicts, arrays and tensors."""
    optimizer, plain = _wrapped(_inner(_bag())), _inner(_bag())
    users, oracle = _Users(optimizer, decays=decays), _Users(plain, decays=decays)
    schedule = LandedLRScheduler(users)
    plain.step()
    for skip in (False, True, True, False, True, False, True):
        schedule.step(_step(optimizer, skip))
        if not skip:
            oracle.step()
    assert schedule.last_epoch == oracle.last_epoch == 3
    assert users.factors == oracle.factors
    assert users.seen == oracle.seen
    assert np.array_equal(users.history, oracle.history)
    assert torch.equal(users.table, oracle.table)
    assert [float(g["weight_decay"]) for g in optimizer.param_groups] == [g["weight_decay"] for g in plain.param_groups]
    assert schedule.get_last_lr() == [group["lr"] for group in plain.param_groups]


@pytest.mark.parametrize(
    "cell",
    [Cell(torch.float16, "replicated", "compact"), Cell(torch.bfloat16, "zero1"), Cell(torch.float32, "fsdp2")],
    ids=str,
)
def test_options_stay_in_every_layout(cell: Cell, ranks: RankPool) -> None:
    """A skipped step, then weight decay 0.0 and a longer schedule: both are there after the next step."""
    for found in ranks.run(cell.world_size, _life, cell):
        assert found == (0.0, 1000, 1, True)


def _life(cell: Cell) -> tuple[float, int, int, bool]:
    model = cell.model()
    optimizer = cell.optimizer(model)
    schedule = LandedLRScheduler(torch_lr.CosineAnnealingLR(optimizer, 10))
    for bad in (True, False):
        optimizer.zero_grad()
        grads = integers(cell.shapes, 1)
        cell.backward(optimizer, model, [grad * float("inf") for grad in grads] if bad else grads)
        schedule.step(optimizer.step().success)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        schedule.T_max = 1000
    bare = torch_lr.CosineAnnealingLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0**-7), 1000)
    bare.optimizer.step()
    bare.step()
    is_right = [float(rate) for rate in schedule.get_last_lr()] == bare.get_last_lr()
    return optimizer.param_groups[0]["weight_decay"], schedule.T_max, schedule.last_epoch, is_right
