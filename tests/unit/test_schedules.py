"""LR schedules count landed steps only: rates are those of a schedule that never saw the skipped ones."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_lr
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from megascale import ChainedOptimizer, DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.amp import GradScaler
from megascale.errors import UsageError
from megascale.schedules import LandedLRScheduler
from tests.counting import OperatorCounter
from tests.training import Bag, Sign, same_bits, snapshot

Make = Callable[[torch.optim.Optimizer], LRScheduler]


def _noisy(epoch: int) -> float:
    return 1.0 / (1 + math.sqrt(epoch + 0.37))


SCHEDULES: dict[str, Make] = {
    "lambda": lambda o: torch_lr.LambdaLR(o, _noisy),
    "lambda_per_group": lambda o: torch_lr.LambdaLR(o, [_noisy, lambda epoch: 0.9**epoch]),
    "multiplicative": lambda o: torch_lr.MultiplicativeLR(o, _noisy),
    "step": lambda o: torch_lr.StepLR(o, 3, 0.3),
    "multi_step": lambda o: torch_lr.MultiStepLR(o, [2, 3, 7], 0.3),
    "constant": lambda o: torch_lr.ConstantLR(o, 0.3, 4),
    "linear": lambda o: torch_lr.LinearLR(o, 0.1, 0.9, 7),
    "exponential": lambda o: torch_lr.ExponentialLR(o, 0.83),
    "polynomial": lambda o: torch_lr.PolynomialLR(o, 9, 1.7),
    "cosine": lambda o: torch_lr.CosineAnnealingLR(o, 7, 1e-4),
    "warm_restarts": lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 3, 2, 1e-4),
    "one_cycle": lambda o: torch_lr.OneCycleLR(o, [0.1, 0.3], total_steps=40, cycle_momentum=False),
    "cyclic": lambda o: torch_lr.CyclicLR(o, 1e-3, 0.1, 4, mode="exp_range", gamma=0.97, cycle_momentum=False),
    "swa": lambda o: SWALR(o, 0.02, 5),
    "sequential": lambda o: torch_lr.SequentialLR(
        o, [torch_lr.LinearLR(o, 0.1, 1.0, 4), torch_lr.CosineAnnealingLR(o, 8)], [4]
    ),
    "chained": lambda o: torch_lr.ChainedScheduler(
        [torch_lr.ConstantLR(o, 0.3, 4), torch_lr.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "one_cycle_momentum": lambda o: torch_lr.OneCycleLR(o, [0.1, 0.3], total_steps=40),
    "cyclic_momentum": lambda o: torch_lr.CyclicLR(o, 1e-3, 0.1, 4),
}
MOMENTUM = ("one_cycle_momentum", "cyclic_momentum")
SKIPS = st.lists(st.booleans(), min_size=1, max_size=16)
RESUMED = [False, True, True, False, False, True, False, False, False, True, False, False, False]


def _bag() -> Bag:
    return Bag([torch.ones(3, dtype=torch.float16), torch.full((2,), 0.5, dtype=torch.float16)])


def _inner(bag: Bag, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [bag[0]], "lr": 0.01}, {"params": [bag[1]], "lr": 0.003}]
    return torch.optim.AdamW(groups, **options)


def _sgd(bag: Bag) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [bag[0]], "lr": 0.01}, {"params": [bag[1]], "lr": 0.003}], momentum=0.9)


def _wrapped(inner: torch.optim.Optimizer, **options: Any) -> MixedPrecisionOptimizer:
    config = OptimizerConfig(fp16=True, **options)
    return MixedPrecisionOptimizer(inner, config, DynamicGradScaler(16.0, 1.0, 2.0, 0.5, 4, 1), grads_are_scaled=True)


def _step(optimizer: MixedPrecisionOptimizer | ChainedOptimizer, skip: bool) -> Tensor:
    """Take a step, or skip one; returns success."""
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            param.grad = torch.full_like(param, math.inf if skip and index == 0 else 0.25)
    return optimizer.step().success


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return every group's options, rates as numbers."""
    kept = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups]
    return [options | {"lr": float(options["lr"])} for options in kept]


class _Oracle:
    """A bare schedule on a plain optimizer, which is only told of landed steps."""

    def __init__(self, make: Make, inner: Callable[[Bag], torch.optim.Optimizer]) -> None:
        self.optimizer = inner(_bag())
        self.schedule = make(self.optimizer)
        self.optimizer.step()

    def step(self, skip: bool) -> None:
        if not skip:
            self.schedule.step()


def _inner_for(name: str) -> Callable[[Bag], torch.optim.Optimizer]:
    return _sgd if name == "cyclic_momentum" else _inner


@pytest.mark.default("exponential")
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=10, deadline=None)
@given(skips=SKIPS, tells=st.booleans())
def test_rates_are_those_of_landed_steps(name: str, skips: list[bool], tells: bool) -> None:
    """After any sequence of skips, rates, momentum and betas are bitwise those of a bare schedule without the skipped
    steps, told of success or not: a skipped step must not advance a schedule (pytorch 44511, 55585, 67590).
    """
    inner = _inner_for(name)
    optimizer = _wrapped(inner(_bag()))
    schedule, oracle = LandedLRScheduler(SCHEDULES[name](optimizer)), _Oracle(SCHEDULES[name], inner)
    for skip in skips:
        success = _step(optimizer, skip)
        schedule.step(success if tells else None)
        oracle.step(skip)
        assert _options(optimizer) == _options(oracle.optimizer)
    assert schedule.state_dict() == oracle.schedule.state_dict()
    if name != "chained":  # torch's has none
        assert schedule.last_epoch == skips.count(False)


@pytest.mark.default("swa", "lambda", "multiplicative", "exponential")
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in MOMENTUM])
def test_no_host_read(name: str) -> None:
    """Stepping, skipping and asking for rates reads nothing on the host."""
    optimizer = _wrapped(_inner(_bag()))
    schedule = LandedLRScheduler(SCHEDULES[name](optimizer))
    with OperatorCounter() as counter:
        for skip in RESUMED:
            schedule.step(_step(optimizer, skip))
            schedule.known_lr(), schedule.get_last_lr()
            _step(optimizer, skip)
            schedule.step()
    assert counter.host_reads == 0
    assert counter.counts[torch.ops.aten.masked_fill_.Scalar] > 0


@pytest.mark.default("adamw-native", "sgd-torch", "lion-reference")
@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion"])
def test_training_without_skips_is_that_of_numbers(kind: str, backend: str) -> None:
    """An fp64 rate on the device trains to the same bits as the number that torch's schedule puts there.

    torch's fused kernels read rates from tensors in fp32, half an ulp off: that moves a main param by an ulp a step at
    most.
    """
    kinds: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.013, weight_decay=0.1),
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.013, momentum=0.9, weight_decay=0.1),
        "lion": lambda m: Lion(m.parameters(), lr=0.0013, weight_decay=0.1),
    }
    trained = []
    steps = 20
    for lands in (False, True):
        torch.manual_seed(0)
        bag = Bag([torch.randn(64).half(), torch.randn(33).half()])
        optimizer = _wrapped(kinds[kind](bag), backend=backend)
        bare = torch_lr.CosineAnnealingLR(optimizer, 30)
        schedule: Any = LandedLRScheduler(bare) if lands else bare
        for step in range(steps):
            for param in bag.parameters():
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).half()
            optimizer.step()
            schedule.step()
        trained.append(snapshot(optimizer, bag))
    if backend == "torch" and kind == "adamw":
        for key in (key for key in trained[0] if key.startswith("main")):
            numbers, tensors = (one[key].view(torch.int32) for one in trained)
            assert (numbers - tensors).abs().max() <= steps, key
    else:
        assert same_bits(*trained)


@pytest.mark.parametrize("on", ["inner", "wrapper"])
def test_torch_does_not_warn(on: str) -> None:
    """Neither a schedule of the inner optimizer nor two halves of a step bring torch's warning about their order."""
    inner = _inner(_bag())
    early = torch_lr.StepLR(inner, 1)
    optimizer = _wrapped(inner)
    schedule = (
        LandedLRScheduler(early, optimizer) if on == "inner" else LandedLRScheduler(torch_lr.StepLR(optimizer, 1))
    )
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.prepare_grads()
        schedule.step(optimizer.step_with_ready_grads().success)
        schedule.step(_step(optimizer, True))
    assert schedule.last_epoch == 1


@pytest.mark.default("3-optimizer_first-one_cycle_momentum", "1-schedule_first-multiplicative")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("cut", "order"), [(1, "schedule_first"), (3, "optimizer_first")])
def test_resume_is_bitwise(name: str, cut: int, order: str) -> None:
    """State saved after any step, skipped or landed, continues to the same bits; the bare schedule reads it too."""
    inner = _inner_for(name)
    bag = _bag()
    optimizer = _wrapped(inner(bag))
    schedule = LandedLRScheduler(SCHEDULES[name](optimizer))
    oracle = _Oracle(SCHEDULES[name], inner)
    for step, skip in enumerate(RESUMED):
        if step == cut:
            saved, model_state = (optimizer.state_dict(), schedule.state_dict()), copy.deepcopy(bag.state_dict())
            bag = _bag()
            bag.load_state_dict(model_state)
            optimizer = _wrapped(inner(bag))
            schedule = LandedLRScheduler(SCHEDULES[name](optimizer))
            loads: list[tuple[Any, Any]] = [(optimizer, saved[0]), (schedule, saved[1])]
            for target, state in loads if order == "optimizer_first" else reversed(loads):
                target.load_state_dict(state)
            bare = SCHEDULES[name](_wrapped(inner(_bag())))
            bare.load_state_dict(saved[1])
            assert bare.state_dict() == oracle.schedule.state_dict()
        schedule.step(_step(optimizer, skip))
        oracle.step(skip)
        assert _options(optimizer) == _options(oracle.optimizer)
    assert schedule.state_dict() == oracle.schedule.state_dict()


def test_known_rates_are_one_step_old() -> None:
    """Without waiting, the host knows the rates before the last step; the rates handed out are copies."""
    optimizer = _wrapped(_inner(_bag()))
    schedule = LandedLRScheduler(torch_lr.ExponentialLR(optimizer, 0.5))
    schedule.step(_step(optimizer, False))
    assert not hasattr(schedule, "no_such_attribute")  # nothing to wait for
    assert schedule.known_lr() == [0.01, 0.003]
    [rate, _] = schedule.get_last_lr()
    assert isinstance(rate, Tensor)
    assert rate.item() == 0.005
    rate.fill_(7.0)
    schedule.step(_step(optimizer, True))
    assert schedule.known_lr() == [0.005, 0.0015]
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.005, 0.0015]


@pytest.mark.parametrize("how", ["number", "tensor", "other_tensor"])
@pytest.mark.parametrize("skip_before", [False, True])
def test_rates_that_others_write_are_taken_over(how: str, skip_before: bool) -> None:
    """A rate put into a group, as a number or in a tensor, is where a chainable schedule continues, as in torch."""
    optimizer = _wrapped(_inner(_bag()))
    schedule = LandedLRScheduler(torch_lr.ExponentialLR(optimizer, 0.5))
    schedule.step(_step(optimizer, False))
    schedule.step(_step(optimizer, skip_before))
    group = optimizer.param_groups[0]
    if how == "number":
        group["lr"] = 0.25
    elif how == "tensor":
        group["lr"].fill_(0.25)
    else:
        group["lr"] = torch.tensor(0.25)
    schedule.step(_step(optimizer, True))
    assert float(group["lr"]) == 0.25
    schedule.step(_step(optimizer, False))
    schedule.step(_step(optimizer, True))
    assert float(group["lr"]) == 0.125
    assert float(optimizer.param_groups[1]["lr"]) == 0.003 * (0.25 if skip_before else 0.125)


@pytest.mark.parametrize("name", ["lambda", "one_cycle", "swa", "sequential", "cyclic", "one_cycle_momentum"])
def test_rate_given_as_a_tensor(name: str) -> None:
    """An optimizer built with a tensor for lr keeps that very tensor, and the schedule computes in numbers."""
    rates = [torch.tensor(0.25, dtype=torch.float64), torch.tensor(0.125, dtype=torch.float64)]
    numbers = [0.25, 0.125]
    bag = _bag()
    optimizer = _wrapped(torch.optim.AdamW([{"params": [bag[i]], "lr": rates[i]} for i in range(2)]))
    schedule = LandedLRScheduler(SCHEDULES[name](optimizer))
    oracle = _Oracle(
        SCHEDULES[name],
        lambda bag: torch.optim.AdamW([{"params": [bag[i]], "lr": numbers[i]} for i in range(2)]),
    )
    with OperatorCounter() as counter:
        for skip in RESUMED[:9]:
            schedule.step(_step(optimizer, skip))
            oracle.step(skip)
    assert counter.host_reads <= 4  # the rates as torch's constructor left them: once
    assert [group["lr"].item() for group in optimizer.param_groups] == [g["lr"] for g in oracle.optimizer.param_groups]
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))


@pytest.mark.parametrize("inner", [_inner, lambda bag: Sign(bag.parameters())], ids=["on_device", "on_host"])
def test_end_of_a_schedule(inner: Callable[[Bag], torch.optim.Optimizer]) -> None:
    """A schedule's error at its end comes with the landed step it forbids, not with a skipped one; nothing changes."""
    optimizer = _wrapped(inner(_bag()))
    schedule = LandedLRScheduler(torch_lr.OneCycleLR(optimizer, 0.1, total_steps=3, cycle_momentum=False))
    for skip in (False, True, False, False, True, True):
        schedule.step(_step(optimizer, skip))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    state = schedule.state_dict()
    with pytest.raises(ValueError, match="total steps"):
        schedule.step(_step(optimizer, False))
    assert [float(group["lr"]) for group in optimizer.param_groups] == rates
    assert schedule.state_dict() == state


def test_several_steps_between_calls() -> None:
    """Called less often than the optimizer, it advances once if any of the steps landed."""
    optimizer = _wrapped(_inner(_bag()))
    schedule = LandedLRScheduler(torch_lr.ExponentialLR(optimizer, 0.5))
    for skips, epoch in (([True, False, True], 1), ([True, True], 1), ([False, False], 2)):
        for skip in skips:
            _step(optimizer, skip)
        schedule.step()
        assert schedule.last_epoch == epoch


def test_chained_optimizer() -> None:
    """One schedule serves all groups of a ChainedOptimizer."""
    bags = [Bag([torch.ones(2).half()]), Bag([torch.ones(3).half()])]
    scaler = DynamicGradScaler(16.0, 1.0, 2.0, 0.5, 4, 1)
    config = OptimizerConfig(fp16=True)
    parts = [
        MixedPrecisionOptimizer(
            torch.optim.AdamW([(f"{index}.{name}", p) for name, p in bag.named_parameters()], lr=1.0 + index),
            config,
            scaler,
            grads_are_scaled=True,
        )
        for index, bag in enumerate(bags)
    ]
    optimizer = ChainedOptimizer(parts)
    schedule = LandedLRScheduler(torch_lr.ExponentialLR(optimizer, 0.5))
    with OperatorCounter() as counter:
        for skip in (False, True, False, True):
            _step(optimizer, skip)
            schedule.step()
    assert counter.host_reads == 0
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.25, 0.5]


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": False}])
def test_torch_optimizer_with_a_grad_scaler(options: dict[str, Any]) -> None:
    """Around a plain torch optimizer it follows the flag it is given: on the device if the optimizer is fused."""
    module = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, **options)
    schedule = LandedLRScheduler(torch_lr.ExponentialLR(optimizer, 0.5))
    scaler = GradScaler("cpu", init_scale=4.0)
    for skip in (False, True, True, False):
        optimizer.zero_grad()
        loss = module(torch.ones(1, 2)).sum() * (math.inf if skip else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        [found_inf] = scaler._found_inf_per_device(optimizer).values()
        scaler.update()
        schedule.step(found_inf == 0)
    rate = optimizer.param_groups[0]["lr"]
    assert rate == 0.125
    assert isinstance(rate, Tensor) == ("fused" in options)
    with pytest.raises(UsageError, match="pass success"):
        schedule.step()
