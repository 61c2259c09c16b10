"""tests/jobs.py itself: a job leaves nothing behind and keeps no test waiting."""

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from tests.jobs import job, wait_until

HANGS = "import time; print('here', flush=True); time.sleep(600)"
# A child in a session of its own that holds our output, as torchrun's ranks are.
STARTS_ONE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HANGS!r}], start_new_session=True)"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_hanging_child_of_a_job_is_killed_with_it() -> None:
    """A job that hangs in a child of another session: AssertionError in time, with its output, and all are dead."""
    started = time.monotonic()
    with job([sys.executable, "-c", STARTS_ONE]) as hanging:
        wait_until(lambda: "here" in hanging.output, hanging)
        [child] = hanging.children()
        with pytest.raises(AssertionError, match=r"still running after 0.2 s:\nhere"):
            hanging.finish(timeout=0.2)
    wait_until(lambda: not _runs(child))
    assert not _runs(hanging.pid)
    assert time.monotonic() - started < 60


def test_status_of_a_job_is_checked() -> None:
    """Another exit status than the one asked for is an AssertionError that shows what was printed."""
    with job([sys.executable, "-c", "print('why'); raise SystemExit(3)"]) as failing:
        with pytest.raises(AssertionError, match=r"status 3, not 0:\nwhy"):
            failing.finish()
        assert failing.finish(status=3) == "why\n"
    with job([sys.executable, "-c", "import os; print(os.environ['A'])"], {"A": "b"}) as other:
        assert other.finish() == "b\n"


def test_waiting_ends_with_the_job() -> None:
    """wait_until does not outwait a job that has ended."""
    with job([sys.executable, "-c", "pass"]) as brief, pytest.raises(AssertionError):
        wait_until(lambda: False, brief)


def _has_a_child(pid: int) -> bool:
    """Whether a process has a child, alive or a zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                return True
    return False


def test_zombies_do_not_hold_up_close() -> None:
    """A child that nobody has waited for is not waited for here either."""
    leaves = "import os, time\nif os.fork() == 0: os._exit(0)\nprint('forked', flush=True); time.sleep(600)"
    with job([sys.executable, "-c", leaves]) as parent:
        wait_until(lambda: "forked" in parent.output, parent)
        assert _has_a_child(parent.pid)
