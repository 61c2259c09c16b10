"""Spikes of the gradient norm are skipped or clipped: both rules against arithmetic on the host."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    ParallelGroups,
)
from megascale.checkpoint import load, save
from megascale.errors import ArgumentError, SkippedStepsError, StateDictError
from megascale.schedules import LandedLRScheduler
from tests.counting import OperatorCounter
from tests.training import INNER, Bag, bits_equal, model, same_bits, set_grads, snapshot, wrap

ALPHA, THRESH, WARMUP = 0.75, 2.0, 3
ZCLIP: dict[str, Any] = {"zclip_alpha": ALPHA, "zclip_z_thresh": THRESH, "zclip_warmup_steps": WARMUP}


@dataclass
class Host:
    """Both rules in Python's floats, as docs/numerics.md states them."""

    limit: float
    mode: str | None
    clip_grad: float
    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def step(self, norm: float, scale: float) -> tuple[bool, float]:
        """Return whether a step of a norm (NaN: an overflow) is skipped, and what gradients are multiplied by."""
        inv_scale = float(np.float32(1 / scale))
        clip = min(1.0, 1 / (norm + 1e-6) * self.clip_grad) if self.clip_grad else 1.0
        coefficient = float(np.float32(inv_scale * clip))
        if math.isnan(norm) or np.float32(norm) > np.float32(self.limit):
            return True, coefficient
        if self.mode is None:
            return False, coefficient
        deviation = float(np.float32(math.sqrt(np.float32(self.variance))))
        z = (norm - self.mean) / (deviation + 1e-6)
        is_warm = self.count >= WARMUP
        is_spike = is_warm and z > THRESH
        seen = self.mean + deviation * THRESH / (z / THRESH) if is_spike else norm
        if is_spike and self.mode == "clip":
            coefficient = min(coefficient, float(np.float32(seen / (norm + 1e-6) * inv_scale)))
        weight = 1 - ALPHA if is_warm else 1 / (self.count + 1)
        off = seen - self.mean
        self.mean += off * weight
        still_off = off - off * weight
        square = (still_off if is_warm else off) * still_off
        self.variance += (square - self.variance) * weight
        self.count += 1
        return is_spike and self.mode == "skip", coefficient


def _one_number(options: dict[str, Any], backend: str) -> tuple[Bag, MixedPrecisionOptimizer]:
    """Return a parameter of one element, whose gradient is its own norm, and its optimizer."""
    bag = Bag([torch.zeros(1)])
    return bag, wrap(bag, INNER["sgd"], 2.0**4, backend=backend, **options)


# The squares of these are exact in fp32, in which some backends add them.
NORMS = st.one_of(st.sampled_from([math.nan, 1.0, 1.0, 1.25, 2.0**13, 0.0]), st.integers(0, 1024).map(lambda n: n / 64))
EVENTS = st.lists(st.one_of(NORMS, NORMS, NORMS, st.just("resume")), min_size=8, max_size=24)


BACKENDS = ["native", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reference", "torch"))]


@pytest.mark.native
def test_a_norm_at_the_threshold_lands() -> None:
    """Megatron-Core skips norms that exceed it."""
    for norm, lands in ((8.0, True), (8.0078125, False)):
        bag, optimizer = _one_number({"grad_norm_skip_threshold": 8.0}, "native")
        bag[0].grad = torch.tensor([norm * optimizer.get_loss_scale().item()])
        assert bool(optimizer.step().success) == lands


@pytest.mark.native
def test_a_norm_at_the_largest_z_score_lands() -> None:
    """ZClip's spikes exceed it."""
    host = Host(math.inf, "skip", 0.0)
    for norm in (1.0, 1.25, 1.0):
        host.step(norm, 1.0)
    z = (2.0 - host.mean) / (float(np.float32(math.sqrt(np.float32(host.variance)))) + 1e-6)
    for thresh, lands in ((z, True), (math.nextafter(z, 0.0), False)):
        bag, optimizer = _one_number({**ZCLIP, "zclip": "skip", "zclip_z_thresh": thresh}, "native")
        for norm in (1.0, 1.25, 1.0, 2.0):
            bag[0].grad = torch.tensor([norm]) * optimizer.get_loss_scale()
            landed = bool(optimizer.step().success)
        assert landed == lands


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@example(events=[1.0, 1.25, 1.0, 1.25, 16.0, 1.0], limit=math.inf, mode="clip", clip_grad=0.0)
@given(EVENTS, st.sampled_from([math.inf, 8.0]), st.sampled_from([None, "clip", "skip"]), st.sampled_from([0.0, 1.5]))
def test_rules_of_the_host(backend: str, events: list[Any], limit: float, mode: str | None, clip_grad: float) -> None:
    """Decision, coefficient and statistics have the host's bits; the scale moves as if only overflows were skipped."""
    options = {"grad_norm_skip_threshold": limit, "zclip": mode, "clip_grad": clip_grad, **ZCLIP}
    bag, optimizer = _one_number(options, backend)
    host, scaler = Host(limit, mode, clip_grad), DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 4, 1)
    skipped = 0
    for event in events:
        if event == "resume":
            state = optimizer.state_dict()
            bag, optimizer = _one_number(options, backend)
            optimizer.load_state_dict(state)
            continue
        bag[0].grad = torch.tensor([event * scaler.scale.item()])
        found = optimizer.prepare_grads()
        must_skip, coefficient = host.step(event, scaler.scale.item())
        assert optimizer.decision is not None
        assert bool(found) == must_skip
        if not must_skip:
            assert optimizer.decision.coefficient.item() == coefficient
        before = bag[0].item()
        result = optimizer.step_with_ready_grads()
        assert bool(result.success) == (not must_skip)
        assert must_skip <= (bag[0].item() == before)
        scaler.update(math.isnan(event))
        assert bits_equal(optimizer.get_loss_scale(), scaler.scale)
        skipped += must_skip
        if mode is not None:
            kept = optimizer.state_dict()["norm_statistics"]
            assert kept == {"mean": host.mean, "variance": host.variance, "count": host.count}
    assert optimizer.num_skipped_steps.item() == skipped


def test_first_statistics_are_those_of_the_warmup() -> None:
    """After the warm-up: the mean and the population variance of its norms."""
    bag, optimizer = _one_number({"zclip": "clip", "zclip_warmup_steps": 25}, "reference")
    norms = [1.0 + (7 * step % 25) / 8 for step in range(25)]
    for norm in norms:
        bag[0].grad = torch.tensor([norm]) * optimizer.get_loss_scale()
        assert optimizer.step().success
    kept = optimizer.state_dict()["norm_statistics"]
    assert kept["mean"] == pytest.approx(statistics.fmean(norms), rel=1e-12)
    assert kept["variance"] == pytest.approx(statistics.pvariance(norms), rel=1e-12)
    assert kept["count"] == 25


def _spiky(module: Any, optimizer: Any, *, steps: int) -> list[bool]:
    landed = []
    for step in range(steps):
        set_grads(module, step, 100.0 if step % 8 == 6 else 1.0)
        landed.append(bool(optimizer.step().success))
    return landed


def _replicated(module: Any) -> Any:
    return wrap(module, INNER["adamw_fused"], 8.0, zclip="skip", **ZCLIP)


def _config() -> OptimizerConfig:
    return OptimizerConfig(fp16=True, clip_grad=0.0, zclip="skip", **ZCLIP)


def _sharded(module: Any) -> Any:
    inner = torch.optim.AdamW(module.named_parameters())
    scaler = DynamicGradScaler(8.0)
    return DistributedOptimizer(
        inner, _config(), scaler, modules=module, groups=ParallelGroups(), grads_are_scaled=True
    )


def _chained(module: Any) -> Any:
    named, scaler = list(module.named_parameters()), DynamicGradScaler(8.0)
    parts = (named[:3], named[3:])
    return ChainedOptimizer(
        [MixedPrecisionOptimizer(torch.optim.AdamW(p), _config(), scaler, grads_are_scaled=True) for p in parts]
    )


@pytest.mark.parametrize("build", [_replicated, _chained])
def test_spikes_change_nothing_and_resume(build: Any, tmp_path: Path) -> None:
    """A spike skips all members of a chain, keeps every bit, and delays a schedule; a checkpoint continues bit for bit,
    through megascale.checkpoint and through a state dict.
    """
    module = model()
    optimizer = build(module)
    schedule = LandedLRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    assert _spiky(module, optimizer, steps=6) == [True] * 6
    saved = optimizer.state_dict()
    save(tmp_path, 6, module, optimizer)
    schedule.step()
    before = snapshot(optimizer, module)
    set_grads(module, 6, 100.0)
    assert not optimizer.step().success
    assert same_bits(before, snapshot(optimizer, module))
    assert optimizer.num_skipped_steps.item() == 1
    rate = float(optimizer.param_groups[0]["lr"])
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == rate
    expected = optimizer.state_dict()["norm_statistics"]
    assert expected["count"] == 7
    for restore in (lambda one, into: into.load_state_dict(saved), lambda one, into: load(tmp_path, one, into)):
        other = model(seed=1)
        resumed = build(other)
        restore(other, resumed)
        set_grads(other, 6, 100.0)
        assert not resumed.step().success
        assert resumed.state_dict()["norm_statistics"] == expected


def test_state_without_statistics_loads() -> None:
    """Of an optimizer without zclip, and into one; damaged statistics are refused by name and change nothing."""
    module, plain = model(), model(seed=1)
    optimizer, other = _replicated(module), wrap(plain, INNER["adamw_fused"], 8.0)
    optimizer.load_state_dict(optimizer.state_dict())  # before the first step
    _spiky(module, optimizer, steps=5)
    state = optimizer.state_dict()
    other.load_state_dict(state)
    assert "norm_statistics" not in other.state_dict()
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["norm_statistics"] == state["norm_statistics"]
    good = {"mean": 1.0, "variance": 1.0, "count": 3}
    for damaged in (3, {"mean": 1.0}, good | {"variance": -1.0}, good | {"mean": math.nan}, good | {"count": 1.5}):
        for call in (optimizer.load_state_dict, optimizer.live_state().check):
            with pytest.raises(StateDictError, match="norm_statistics"):
                call(state | {"norm_statistics": damaged}, strict=True)
    assert optimizer.state_dict()["norm_statistics"] == state["norm_statistics"]


@pytest.mark.parametrize("build", [_replicated, _chained])
def test_torch_carries_the_statistics(build: Any) -> None:
    """Through torch.distributed.checkpoint.state_dict, nested and flat, bit for bit."""
    from torch.distributed.checkpoint import state_dict as dsd

    get: Any = dsd.get_optimizer_state_dict
    put: Any = dsd.set_optimizer_state_dict
    for flat in (False, True):
        options = dsd.StateDictOptions(flatten_optimizer_state_dict=flat)
        module, other = model(), model(seed=1)
        optimizer, resumed = build(module), build(other)
        _spiky(module, optimizer, steps=5)
        optimizer.zero_grad()
        put(other, resumed, get(module, optimizer, options=options), options=options)
        assert resumed.state_dict()["norm_statistics"] == optimizer.state_dict()["norm_statistics"]


OPERATORS = [({"grad_norm_skip_threshold": 8.0}, 4), ({"zclip": "skip"}, 39), ({"zclip": "clip"}, 48)]


@pytest.mark.native
@pytest.mark.parametrize(("options", "most"), OPERATORS)
def test_rules_cost_scalar_operators_only(options: dict[str, Any], most: int) -> None:
    """No host read, and so many operators on single numbers more than without a rule, for any number of tensors."""
    counted = []
    for extra in ({}, options):
        for count in (7, 100):
            module = Bag(torch.ones(3, dtype=torch.float16) for _ in range(count))
            optimizer = wrap(module, INNER["adamw_fused"], 8.0, clip_grad=1.0, backend="native", **extra)
            for step in range(3):
                set_grads(module, step)
                with OperatorCounter() as operators:
                    optimizer.step()
                assert operators.host_reads == 0
            counted.append(sum(operators.counts.values()))
    assert counted[0] == counted[1]
    assert counted[2] == counted[3]
    assert counted[2] - counted[0] <= most


@pytest.mark.native
@pytest.mark.parametrize("rule", [{"grad_norm_skip_threshold": 1.0}, {"zclip": "skip", **ZCLIP, "zclip_alpha": 0.0}])
def test_spikes_count_for_the_budget(rule: dict[str, Any]) -> None:
    """Steps that are skipped for their norm, too, are skips in a row; the error says so."""
    bag, optimizer = _one_number({"max_consecutive_skips": 4, **rule}, "native")
    for step in range(4):
        bag[0].grad = torch.tensor([0.5 + step % 2 / 64]) * optimizer.get_loss_scale()
        assert optimizer.step().success
    norm = 4.0
    for _ in range(4):
        norm *= 50.0
        bag[0].grad = torch.tensor([norm]) * optimizer.get_loss_scale()
        assert not optimizer.step().success
    bag[0].grad = torch.tensor([norm * 50]) * optimizer.get_loss_scale()
    with pytest.raises(SkippedStepsError, match=r"5 steps in a row .*allows 4: the gradient norm was a spike in 5 of"):
        optimizer.step()
    assert optimizer.num_skipped_steps.item() == 4


BAD = [
    {"grad_norm_skip_threshold": 0.0},
    {"grad_norm_skip_threshold": math.nan},
    {"grad_norm_skip_threshold": -math.inf},
    {"zclip": "off"},
    {"zclip_z_thresh": 0.0},
    {"zclip_alpha": 1.0},
    {"zclip_warmup_steps": 1},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_fields_are_checked(bad: dict[str, Any]) -> None:
    """By name and value."""
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        OptimizerConfig(**bad)


def test_members_of_a_chain_have_one_rule() -> None:
    """A chain takes one decision: members that ask for others are refused, with the field's name."""
    named, scaler = list(model().named_parameters()), DynamicGradScaler(8.0)
    configs = [OptimizerConfig(fp16=True), OptimizerConfig(fp16=True, grad_norm_skip_threshold=3.0)]
    parts = [
        MixedPrecisionOptimizer(torch.optim.AdamW(part), config, scaler, grads_are_scaled=True)
        for part, config in zip((named[:3], named[3:]), configs, strict=True)
    ]
    with pytest.raises(ArgumentError, match=r"config.grad_norm_skip_threshold=3.0, optimizers\[0\] has inf"):
        ChainedOptimizer(parts)
