"""Fixtures shared by every test."""

import atexit
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.fake_device.device import why_not
from tests.fake_device.process import OnDevice
from tests.levels import DEFAULT, UNKNOWN_CASES, leave_to_slow, processes
from tests.needs import missing, not_built
from tests.pool import RankPool

if not torch.accelerator.is_available():
    # Triton reads this once, when it is first imported. Ranks and other programs that tests start inherit it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Programs that tests start, and the processes of pytest-xdist, would compile every module anew: a second for each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Ranks have one thread each. What is compared with them bit by bit must be too: threads change how a matmul rounds.
torch.set_num_threads(1)

# The same examples on any day. An example may take long on a busy machine: tests count, they do not time.
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)  # .ci/release takes it, and prints its seed
settings.load_profile("same")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks that stay up for the session: `ranks.run(world_size, function, *args)`. See tests/pool.py."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def on_device() -> Iterator[OnDevice]:
    """Processes with a CUDA device that is not there: `on_device(function, *args)`. See tests/fake_device."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    processes = OnDevice()
    yield processes
    processes.close()


def pytest_configure() -> None:
    """Run no test on torch's kernels in place of native.c's, which could be there."""
    if (reason := not_built()) is not None:
        raise pytest.UsageError(reason)


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make, not at all modules and tests: it runs thousands of times."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind's libraries count at the end what was not collected


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run everything in several processes. A file's tests stay together: they share what its fixtures have made."""
    if (number := processes(config)) is not None:
        config.option.numprocesses, config.option.dist = number, "loadfile"
        config.option.loadscopereorder = False  # long files first come before short ones


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, where that is installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Start the simulated device in one process, if its tests do not take minutes: see tests/scheduling.py."""
    from tests.scheduling import ByFile

    are_quick = config.option.markexpr == DEFAULT
    return ByFile(config, log) if are_quick and config.option.dist == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each case its level: see tests/levels.py."""
    config.stash[UNKNOWN_CASES] = leave_to_slow(items)


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what this machine has not: see tests/needs.py."""
    if (reason := missing(item)) is not None:
        pytest.skip(reason)
