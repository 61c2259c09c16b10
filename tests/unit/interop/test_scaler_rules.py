"""Found scalers follow their peers' rules from any state that the peer can be in: every scale equal."""

from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megascale.interop import DeepSpeedGradScaler, load_scaler_state
from tests.counting import HOST_READ, OperatorCounter
from tests.unit.interop.oracles import DeepSpeed, Megatron, OldMegatron, Torch

SCALE = 2.0**20
# At most 60 steps from 2**20: no peer leaves the range that ours has.
STEPS = st.lists(st.booleans(), max_size=30)
WINDOW = st.integers(1, 6)
HYSTERESIS = st.integers(1, 4)


def follows(scaler: Any, peer: Any, steps: list[bool]) -> None:
    """Assert equal scales at every one of ``steps``."""
    for step, overflow in enumerate(steps):
        scaler.update(overflow)
        assert float(scaler.scale) == peer.update(overflow), f"step {step}"


def after(peer: Any, steps: list[bool]) -> Any:
    """Return the peer after ``steps``."""
    for overflow in steps:
        peer.update(overflow)
    return peer


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DeepSpeed, OldMegatron])
@given(window=WINDOW, hysteresis=HYSTERESIS, consecutive=st.booleans(), before=STEPS, later=STEPS)
@example(window=3, hysteresis=2, consecutive=False, before=[False] * 3, later=[False] * 20)  # a first growth is next
@example(window=3, hysteresis=2, consecutive=False, before=[False] * 4, later=[False] * 20)  # it has just grown
@example(window=3, hysteresis=2, consecutive=True, before=[True] * 3, later=[False] * 20)  # a first growth is far
@settings(max_examples=150, deadline=None)
def test_iteration_counts_become_trackers(
    kind: Any, window: int, hysteresis: int, consecutive: bool, before: list[bool], later: list[bool]
) -> None:
    """DeepSpeed's cur_iter and last_overflow_iter, and old Megatron's, continue exactly from every state."""
    peer = after(kind(SCALE, window, hysteresis, consecutive), before)
    follows(load_scaler_state(peer.saved()).build_grad_scaler(), peer, later)


@given(interval=WINDOW, hysteresis=HYSTERESIS, before=STEPS, later=STEPS)
@settings(max_examples=150, deadline=None)
def test_megatron_continues(interval: int, hysteresis: int, before: list[bool], later: list[bool]) -> None:
    """Megatron-Core's state, hysteresis trackers below 0 too, continues exactly."""
    peer = after(Megatron(SCALE, interval, hysteresis), before)
    scaler = load_scaler_state(peer.saved()).build_grad_scaler(
        growth_interval=interval, hysteresis=hysteresis, min_scale=peer.min_scale
    )
    follows(scaler, peer, later)


@given(interval=WINDOW, before=STEPS, later=STEPS)
@settings(max_examples=100, deadline=None)
def test_torch_continues(interval: int, before: list[bool], later: list[bool]) -> None:
    """torch.amp's state continues exactly."""
    peer = after(Torch(SCALE, interval), before)
    follows(load_scaler_state(peer.saved()).build_grad_scaler(), peer, later)


@given(found=st.lists(st.booleans(), max_size=40), window=WINDOW, hysteresis=HYSTERESIS)
@settings(max_examples=60, deadline=None)
def test_deepspeed_scaler_resumes_itself(found: list[bool], window: int, hysteresis: int) -> None:
    """DeepSpeedGradScaler's own state dict, loaded into a new one at any step, changes nothing."""
    assume(found)
    scaler = DeepSpeedGradScaler(SCALE, 2.0**-100, 2.0, 0.5, window, hysteresis)
    peer = DeepSpeed(SCALE, window, hysteresis, False)
    for overflow in found:
        fresh = DeepSpeedGradScaler(1.0, 2.0**-100, 2.0, 0.5, window, hysteresis)
        fresh.load_state_dict(scaler.state_dict())
        scaler = fresh
        follows(scaler, peer, [overflow])


def test_deepspeed_scaler_takes_device_flags_without_a_sync() -> None:
    """A tensor found_inf, NaN too, is not read on the host."""
    scaler = DeepSpeedGradScaler(SCALE, 1.0, 2.0, 0.5, 2, 1)
    with OperatorCounter() as operators:
        for value in (0.0, 0.0, 0.0, 1.0, float("nan")):
            scaler.update(torch.tensor(value))
    assert operators.counts[HOST_READ] == 0
    assert float(scaler.scale) == SCALE / 2
