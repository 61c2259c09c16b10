"""A part of the fault campaign; `python -m tests.reliability.campaign` is the whole of it."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.pool import RankPool
from tests.reliability import disk_faults, host_faults
from tests.reliability.faults import Fault
from tests.reliability.kills import UPDATING, kill_ranks, kill_under_torchrun

RELEASE = pytest.mark.release


def _check(faults: Iterable[Fault], least: int) -> None:
    found = list(faults)
    assert [fault for fault in found if not fault.as_promised] == []
    assert len(found) >= least


@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(10, marks=RELEASE)])
def test_killed_runs_end_with_the_same_bits(kills: int, tmp_path: Path, ranks: RankPool) -> None:
    """SIGKILL of a rank or of all at random moments of training and saving: each survivor ends with a named error, each
    checkpoint loads, and the run goes on to the bits of the one that was never killed.
    """
    _check(kill_ranks(kills, 1, tmp_path, ranks), kills)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(20, marks=RELEASE)])
def test_kills_in_background_updates(kills: int, tmp_path: Path, ranks: RankPool) -> None:
    """SIGKILL in the middle of an update in host memory: the last checkpoint is whole, and the run goes on from it to
    the bits of one without offload that was never killed.
    """
    found = list(kill_ranks(kills, 3, tmp_path, ranks, in_host_memory=True))
    _check(found, kills)
    assert sum(UPDATING in fault.fault for fault in found) >= kills


@pytest.mark.release
def test_killed_runs_below_torchrun(tmp_path: Path, ranks: RankPool) -> None:
    """Torchrun starts all ranks again, twice, and the end is the same."""
    _check(kill_under_torchrun(2, 2, tmp_path, ranks), 2)


@pytest.mark.release
def test_disks_that_fail(tmp_path: Path, ranks: RankPool) -> None:
    """Full, read-only or gone during a save: one error on both ranks; the checkpoint before stays; later saves work."""
    if missing := disk_faults.why_not(tmp_path):
        pytest.skip(missing)
    _check(disk_faults.broken_disks(tmp_path / "disks", ranks), 6)


@pytest.mark.release
def test_link_between_hosts_is_cut(tmp_path: Path) -> None:
    """Two network namespaces train through launch/multi_node.sh. Cut off, each ends and says so."""
    if missing := host_faults.why_not():
        pytest.skip(missing)
    _check(host_faults.cut_link(tmp_path), 2)
