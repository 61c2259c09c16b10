"""The scalers: their rule against an oracle, their state dicts, and everything they refuse."""

import math
import pickle
import random
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

from megascale import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megascale.kernels import Backend, ScaleRule, select_backend

LARGEST = 2.0**127


@dataclass
class Oracle:
    """The documented rule in host numbers; fp32 products are numpy's."""

    scale: np.float32
    minimum: float
    maximum: float
    growth_factor: float
    backoff_factor: float
    interval: int
    hysteresis: int
    reset: str
    growth: int = 0
    left: int = -1

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth = 0
            self.left = max(self.left - 1, 0)
            if self.left == 0:
                self.scale = max(self.scale * np.float32(self.backoff_factor), np.float32(self.minimum))
            return
        self.growth += 1
        if self.reset == "clean_step":
            self.left = self.hysteresis
        if self.growth >= self.interval:
            self.growth = 0
            self.left = self.hysteresis
            with np.errstate(over="ignore"):
                grown = self.scale * np.float32(self.growth_factor)
            if np.isfinite(grown):
                self.scale = min(grown, np.float32(self.maximum))

    def triple(self) -> tuple[float, int, int]:
        return float(self.scale), self.growth, self.left


def _triple(scaler: DynamicGradScaler) -> tuple[float, int, int]:
    state = scaler.state_dict()
    return float(state["scale"]), state["growth_tracker"], state["hysteresis_tracker"]


def _random_pair(rng: random.Random) -> tuple[DynamicGradScaler, Oracle]:
    minimum = rng.choice([2.0**-20, 1.0, 0.3, 128.0])
    maximum = rng.choice([None, None, 2.0**20, 1e6, 2.0**127])
    initial = rng.choice([minimum, 2.0**10, 1000.0, 65536.0])
    initial = max(initial, minimum)
    growth, backoff = rng.choice([2.0, 1.5, 4.0, 2.0**40]), rng.choice([0.5, 0.2, 0.9, 1 / 3])
    interval, hysteresis = rng.randint(1, 6), rng.randint(1, 4)
    reset = rng.choice(["growth", "clean_step"])
    scaler = DynamicGradScaler(
        initial, minimum, growth, backoff, interval, hysteresis, max_scale=maximum, hysteresis_reset=reset
    )
    top = LARGEST if maximum is None else maximum
    return scaler, Oracle(np.float32(initial), minimum, top, growth, backoff, interval, hysteresis, reset)


def follow_schedule(rng: random.Random, steps: int, backend: Backend) -> None:
    """Run one random schedule of bool and tensor updates, saves and loads between, and compare every step."""
    scaler, oracle = _random_pair(rng)
    device = torch.device("cpu")
    if backend.name == "triton":
        device = torch.accelerator.current_accelerator(check_available=True) or device
    scaler.to(device)
    scaler.backend = backend
    overflow_rate = rng.choice([0.05, 0.3, 0.7])
    for _ in range(steps):
        found = rng.random() < overflow_rate
        form = rng.randrange(4)
        scaler.update(found if form == 0 else torch.tensor([float(found)] if form == 1 else float(found)))
        oracle.update(found)
        assert _triple(scaler) == oracle.triple()
        if rng.random() < 0.05:
            state = scaler.state_dict()
            scaler.update(True)  # not the one that loads
            scaler = _same_kind(scaler).to(device)
            scaler.load_state_dict(state)
            scaler.backend = backend


def _same_kind(scaler: DynamicGradScaler) -> DynamicGradScaler:
    return DynamicGradScaler(
        scaler.initial_scale,
        scaler.min_scale,
        scaler.growth_factor,
        scaler.backoff_factor,
        scaler.growth_interval,
        scaler.hysteresis,
        max_scale=scaler.max_scale,
        hysteresis_reset=scaler.hysteresis_reset,
    )


@pytest.mark.default("triton-20")
@pytest.mark.parametrize(("name", "schedules"), [("reference", 200), ("native", 500), ("triton", 20)])
def test_rule_equals_oracle_on_random_schedules(name: str, schedules: int) -> None:
    """The dynamic rule, both hysteresis modes: no difference from the oracle, on every backend with a rule of its own.

    Fewer schedules in Triton's interpreter, which takes milliseconds over one update. More of them below.
    """
    if name == "triton":
        pytest.importorskip("triton")
    rng, backend = random.Random(0), select_backend(name)
    for _ in range(schedules):
        follow_schedule(rng, steps=10, backend=backend)


@pytest.mark.parametrize("name", ["reference", "native", "triton"])
def test_fp64_products_are_torchs(name: str) -> None:
    """With ``fp64_products`` each backend's rule has the bits of torch's operator, by factors that fp32 cannot hold.

    An fp32 product differs from it in some of them.
    """
    if name == "triton":
        pytest.importorskip("triton")
    rng, backend, num_differ = random.Random(0), select_backend(name), 0
    for _ in range(40):
        found, start = float(rng.random() < 0.5), rng.uniform(1e-3, 1e9)
        growth, backoff = rng.choice([1.7, 1.001, 3.3]), rng.choice([0.3, 0.9, 1 / 3])
        scales = {wide: torch.tensor([start]) for wide in (True, False)}
        for wide, scale in scales.items():
            trackers = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
            rule = ScaleRule(2.0**-126, math.inf, growth, backoff, 1, 1, False, fp64_products=wide)
            backend.rescale_(torch.tensor(found), scale, *trackers, rule)
        expected = torch.tensor(start)
        tracker = torch.zeros((), dtype=torch.int32)
        torch._amp_update_scale_(expected, tracker, torch.tensor(found), growth, backoff, 1)
        assert scales[True].item() == expected.item()
        num_differ += scales[False].item() != expected.item()
    assert num_differ > 0


@pytest.mark.release
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["reference", "native"])
def test_rule_equals_oracle_on_100_000_schedules(name: str, seed: int) -> None:
    """The dynamic rule, both hysteresis modes: no difference from the oracle on 100,000 schedules, 10,000 a seed."""
    rng, backend = random.Random(1000 + seed), select_backend(name)
    for _ in range(10_000):
        follow_schedule(rng, steps=rng.randint(1, 20), backend=backend)


def test_scale_never_leaves_fp32() -> None:
    """Megatron's scale grows to inf and stays: ours stops where fp32 holds it and its reciprocal."""
    scaler = DynamicGradScaler(2.0**126, 1.0, 2.0, 0.5, 1, 1)
    for _ in range(5):
        scaler.update(False)
    assert scaler.scale.item() == LARGEST
    assert scaler.inv_scale.item() == 2.0**-127


def test_nan_found_inf_counts_as_found() -> None:
    """A NaN that reached `found_inf` must not read as clean."""
    scaler = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 10, 1)
    scaler.update(torch.tensor(float("nan")))
    assert scaler.scale.item() == 512.0


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_found_inf_may_have_any_dtype(dtype: torch.dtype) -> None:
    """Kernels read fp32."""
    scaler = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 2, 1)
    scaler.backend = select_backend("native")
    for value in (0, 1, 0):
        scaler.update(torch.tensor(value, dtype=dtype))
    assert _triple(scaler) == (512.0, 1, 0)


def test_state_dict_does_not_alias() -> None:
    """A state dict holds the values of its moment."""
    scaler = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 1, 1)
    state = scaler.state_dict()
    scaler.update(False)
    assert state["scale"].item() == 1024.0
    assert scaler.scale.item() == 2048.0


def test_constant_scaler_stays() -> None:
    """A constant scale changes at no update and loads Megatron's empty state."""
    scaler = ConstantGradScaler(128.0)
    scaler.update(True)
    scaler.update(torch.tensor(1.0))
    scaler.load_state_dict({})
    assert scaler.scale.item() == 128.0
    other = ConstantGradScaler(1.0)
    other.load_state_dict(scaler.state_dict())
    assert other.scale.item() == 128.0


def test_loads_megatrons_state() -> None:
    """Megatron's trackers may be below zero, and above a shorter interval, where Megatron itself never grows."""
    scaler = DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 4, 2)
    scaler.load_state_dict({"scale": torch.tensor([256.0]), "growth_tracker": 9, "hysteresis_tracker": -3})
    assert _triple(scaler) == (256.0, 9, 0)
    scaler.update(False)
    assert _triple(scaler) == (512.0, 0, 2)


def test_loads_torchs_own_state() -> None:
    """A real torch.amp.GradScaler's state continues: its scale and growth tracker, our hysteresis."""
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=5)
    theirs.scale(torch.ones(()))
    theirs.load_state_dict(theirs.state_dict() | {"_growth_tracker": 4})
    ours = DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 5, 2)
    ours.load_state_dict(theirs.state_dict())
    assert _triple(ours) == (512.0, 4, 2)
    ours.update(False)
    assert ours.scale.item() == 1024.0


DEFAULTS: dict[str, Any] = {
    "initial_scale": 1024.0,
    "min_scale": 1.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 10,
    "hysteresis": 2,
}


# What an optimizer asks


def test_reads_of_the_scale_are_counted() -> None:
    """Each read of ``scale`` counts as one loss that was scaled, one of ``live_scale`` does not."""
    scaler = ConstantGradScaler(2.0)
    assert (scaler.live_scale.item(), scaler.times_asked) == (2.0, 0)
    assert (scaler.scale.item(), scaler.times_asked) == (2.0, 1)


def _places(scaler: MegatronGradScaler) -> set[str]:
    return {value.device.type for value in vars(scaler).values() if isinstance(value, torch.Tensor)}


def test_state_is_where_it_was_asked_for() -> None:
    """On the CPU unless another device is named, whatever torch's default is; ``to`` moves all of it."""
    with torch.device("meta"):
        scalers = [DynamicGradScaler(**DEFAULTS), ConstantGradScaler(2.0)]
    assert [_places(scaler) for scaler in scalers] == [{"cpu"}] * 2
    for scaler in scalers:
        assert scaler.to("meta") is scaler
        assert _places(scaler) == {"meta"}
        assert scaler.device.type == "meta"
    assert _places(DynamicGradScaler(**DEFAULTS, device="meta")) == {"meta"}


def test_processes_that_are_given_one_scaler_have_one_each() -> None:
    """As torch.multiprocessing.spawn does, to which a tensor on the host is memory that processes share."""
    given = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 1000, 1)
    first, second = (pickle.loads(ForkingPickler.dumps(given)) for _ in range(2))
    first.update(True)
    assert [float(scaler.scale) for scaler in (given, first, second)] == [2.0**10, 2.0**9, 2.0**10]
