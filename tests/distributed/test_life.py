"""Lives of an optimizer on several ranks: see tests/life.py."""

from pathlib import Path

import pytest

from tests.life import live
from tests.pool import RankPool

QUICK = {(2, number) for number in (1, 2, 3, 5)} | {(4, 7)}
"""What the default run has: each layout, and each rule but one."""


@pytest.mark.native
@pytest.mark.parametrize(
    ("ranks_of_life", "number"),
    [
        pytest.param(size, number, marks=() if (size, number) in QUICK else pytest.mark.slow)
        for size, numbers in ((2, range(45)), (4, range(45, 75)), (4, [7]))
        for number in numbers
    ],
)
def test_life(ranks: RankPool, ranks_of_life: int, number: int, tmp_path: Path) -> None:
    """Invariants 1, 2, 3, 6 and 7: each rank compares with a reference of its own, which is told the mean gradients. So
    all ranks hold the same scale, trackers, step counts and state; one rank's overflow skips every rank's step, and one
    rank's broken state dict is refused by all.
    """
    actions, *others = ranks.run(ranks_of_life, live, number, tmp_path)
    assert all(other == actions for other in others)
