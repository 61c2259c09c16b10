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
from tests.lanes import Weekly, day, left_for, mark_what_is_not_sampled, processes
from tests.needs import missing
from tests.pool import RankPool

if not torch.accelerator.is_available():
    # Triton reads this once, when it is first imported. Ranks and other programs that tests start inherit it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Programs that tests start, and the processes of pytest-xdist, would compile the library anew: a second for each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Ranks have one thread each. What is compared with them bit by bit must be too: threads change how a matmul rounds.
torch.set_num_threads(1)

# An example may take long on a busy machine: tests count, they do not time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make, not at all modules and tests: it runs thousands of times."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind's libraries count at the end what was not collected


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let one choose a day of the week: see tests/lanes.py."""
    parser.addoption("--day", type=day, help="0 to 6: of the weekly tests, run those of this day only")


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

    are_quick = config.option.markexpr == "not slow"
    return ByFile(config, log) if are_quick and config.option.dist == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw samples, and leave weekly tests to their day: see tests/lanes.py."""
    mark_what_is_not_sampled(items)
    chosen: int | None = config.getoption("day")
    if chosen is not None:
        left = set(left_for(chosen, items))
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    for item in items:
        if Weekly.of(item) is not None:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what this machine has not: see tests/needs.py."""
    if (reason := missing(item)) is not None:
        pytest.skip(reason)
