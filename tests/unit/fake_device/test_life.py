"""Lives of an optimizer on the simulated device, whose streams run in several orders: see tests/life.py."""

from pathlib import Path

import pytest

from tests.fake_device.device import FakeDevice
from tests.fake_device.orders import RUNS, Run
from tests.fake_device.process import OnDevice
from tests.life import live


def _live(device: FakeDevice, number: int, folder: Path, run: Run | None = None) -> list[str]:
    with device.running(*(run or RUNS[number % len(RUNS)])):
        return live(number, folder, "cuda")


ONE_RANK = [number for number in range(45) if number % 3 != 2]  # FSDP2 needs a process group


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number in (0, 4, 6) else pytest.mark.slow) for number in ONE_RANK]
)
def test_life(on_device: OnDevice, number: int, tmp_path: Path) -> None:
    """Invariants 2, 3 and 6 where work runs on streams: a missing wait, or memory that is freed too early, gives other
    bits than the reference's, which waits for everything.
    """
    assert on_device(_live, number, tmp_path)


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number in (1, 5) else pytest.mark.slow) for number in range(30)]
)
def test_life_of_two_ranks(on_device: OnDevice, number: int, tmp_path: Path) -> None:
    """Invariants 1, 2 and 3 where collectives end on streams, too."""
    actions, *others = on_device.ranks(2, _live, number, tmp_path)
    assert all(other == actions for other in others)


@pytest.mark.release
@pytest.mark.parametrize("seed", range(100))
def test_life_whose_collectives_end_at_points_of_a_seed(on_device: OnDevice, seed: int, tmp_path: Path) -> None:
    """The same invariants in a hundred orders: of two ranks, and of four, where shards have copies."""
    on_device.ranks(4 if seed % 4 == 3 else 2, _live, seed, tmp_path, ("random", seed))
