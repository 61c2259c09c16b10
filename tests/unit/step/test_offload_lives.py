"""Random lives with main params in host memory have the bits of the same lives without."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offload_lives import ACTIONS, Life, first_difference

THERE: dict[str, Any] = {"optimizer_cpu_offload": True}
OVERLAP = THERE | {"overlap_cpu_optimizer_d2h_h2d": True}
WAYS = [OVERLAP, THERE | {"optimizer_offload_fraction": 0.5}]
COMPACT: dict[str, Any] = {
    "store_param_remainders": True,
    "exp_avg_dtype": torch.int8,
    "exp_avg_sq_dtype": torch.uint8,
}
HELD = ("replicated", "synced", "elements", "parameters")
LIVES = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=8)


def _differs(held: str, actions: list[str], stored: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return first_difference(held, stored, WAYS, actions, Path(folder))


@pytest.mark.parametrize(
    "held", [pytest.param(held, marks=pytest.mark.slow if held != "replicated" else ()) for held in HELD]
)
@given(LIVES, st.sampled_from([{}, COMPACT]))
@settings(max_examples=5, deadline=None)
def test_random_lives(held: str, actions: list[str], stored: dict[str, Any]) -> None:
    """Overflows, clips, accumulation, reads, loads, checkpoints, frozen and new parameters, several groups, options
    that change.
    """
    assert _differs(held, actions, stored) == ""


@pytest.mark.timeout(1200)
@pytest.mark.release
@pytest.mark.parametrize("held", HELD)
@given(LIVES, st.sampled_from([{}, COMPACT]))
@settings(max_examples=60, deadline=None)
def test_more_random_lives(held: str, actions: list[str], stored: dict[str, Any]) -> None:
    """The same, more of them."""
    assert _differs(held, actions, stored) == ""


@pytest.mark.default("parameters-step")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("held", HELD)
def test_every_action_is_one(held: str, action: str, tmp_path: Path) -> None:
    """No life is one of errors only: each action works beside steps."""
    life = Life(held, OVERLAP, tmp_path)
    for at, one in enumerate(("step", action, "step")):
        found = life.act(one, at)
        assert not isinstance(found, str), found
