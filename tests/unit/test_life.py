"""Lives of an optimizer in one process: see tests/life.py."""

from pathlib import Path

import pytest

from tests.life import ACTIONS, actions_of, live

NUMBERS = [number for number in range(96) if number % 3 != 2]  # FSDP2 needs ranks
QUICK = 5
"""The default run has as many lives: one of each rule."""


@pytest.mark.native
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=() if at < QUICK else pytest.mark.slow) for at, number in enumerate(NUMBERS)],
)
def test_life(number: int, tmp_path: Path) -> None:
    """Invariants 2, 3, 6, 9 and 10: forty actions beside a reference that has everything in fp32. Skips change no bit;
    each backend, form of state and place of it, whole or in pieces, has the reference's bits; weights are their main
    params' rounding, and written weights are followed, also where they lie elsewhere; what is refused changes nothing.
    """
    live(number, tmp_path)


def test_default_lives_do_everything() -> None:
    """No action is left to the slow lives alone."""
    assert {action for number in NUMBERS[:QUICK] for action in actions_of(number)} == set(ACTIONS)
