"""The example that searches for a wrong gradient finds what is planted; its page says where each kind is made."""

import re
import sys
from pathlib import Path

import pytest

from tests.jobs import job

ROOT = Path(__file__).parents[2]
IN = r"in \d+ of \d+ elements, from"
FOUND = {
    "hook": (rf"step 0: the reduced gradient of 3.weight is wrong on rank 0 {IN} \d to 12\d", ("1.00", "0.50")),
    "before": (rf"step 0: the reduced gradient of 3.bias is wrong on rank 0 {IN} 0 to 3", ("1.00", "1.50")),
    "after": (rf"step 0: the reduced gradient of 0.weight is wrong on rank 1 {IN} 0 to 7", ("1.50", "1.50")),
    "stale": (rf"step 1: the main param of 0.weight is wrong on rank 1 {IN} \d+ to \d+", None),
    "kernel": (rf"step 0: the main param of 0.weight is wrong on rank 1 {IN} \d+ to \d+", None),
    "rounding": (rf"step 0: the model param of 0.weight is wrong on rank 0 {IN} \d+ to 511", None),
    "gather": (rf"step 0: the model param of 3.bias is wrong on rank 1 {IN} 0 to 3", None),
}
"""What the example's first line says of each bug of tests/planted_bugs.py, and how often ranks' gradients count."""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What the example prints: without a bug, and with each."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.planted_bugs"]
    with job([sys.executable, *torchrun], {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}) as running:
        output = running.finish(timeout=600)
    _, *parts = re.split(r"^bug: (\w+)\n", output, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.slow
def test_a_right_step_has_no_wrong_stage(printed: dict[str, str]) -> None:
    """The library's step is plain torch's at each stage."""
    assert sorted(printed["none"].split("\n")[:2]) == ["rank 0: 0 stages wrong", "rank 1: 0 stages wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", FOUND)
def test_a_planted_bug_is_located(printed: dict[str, str], bug: str) -> None:
    """The first stage, rank and elements that are named are those where it is, and whose contribution is wrong."""
    place, counts = FOUND[bug]
    first = re.search("^step.*$", printed[bug], flags=re.MULTILINE)
    assert first is not None
    assert re.fullmatch(place, first[0]), first[0]
    assert (counts is None) == ("counts" not in printed[bug])
    assert counts is None or "  rank 0's counts {} times, rank 1's counts {} times".format(*counts) in printed[bug]
