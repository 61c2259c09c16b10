"""How the tests are cut: into levels, of which each run has one, and into processes.

| level | its tests | who runs it |
|---|---|---|
| default | without a mark | `python -m pytest`, and `.ci/run` |
| slow | `@pytest.mark.slow` | `.ci/run`, which gates main |
| release | `@pytest.mark.release`: minutes, or guards what hardly any change touches | `.ci/release` |

`@pytest.mark.default("zero1-fp16", "fsdp2-bf16")`: of a test whose cases repeat one promise with other values, these
are in the default run, and the others are slow. Cases are named by their ids, and `*` stands for anything.
"""

import os
import re
from collections.abc import Iterable
from typing import Any

import pytest

DEFAULT = "not slow and not release"
"""The expression of the default run, `addopts` in pyproject.toml."""
UNKNOWN_CASES = pytest.StashKey[set[str]]()
"""Of pytest's config: what the marks ``default`` name and no case has."""
PROCESSES = 3
"""Of a run of everything, at most. The default tests keep their cores busy, and have no more processes than cores; slow
tests mostly wait for ranks and programs.
"""


def leave_to_slow(items: Iterable[pytest.Item]) -> set[str]:
    """Mark as slow what the mark ``default`` does not name. Returns the names that no case has: "test: name"."""
    unknown: set[str] = set()
    known: set[str] = set()
    for item in items:
        mark = item.get_closest_marker("default")
        if mark is None:
            continue
        test, _, case = item.nodeid.partition("[")
        fitting = {name for name in mark.args if _fits(name, case.removesuffix("]"))}
        if not fitting:
            item.add_marker(pytest.mark.slow)
        unknown |= {f"{test}: {name}" for name in mark.args}
        known |= {f"{test}: {name}" for name in fitting}
    return unknown - known


def _fits(name: str, case: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, name.split("*"))), case) is not None


def processes(config: pytest.Config) -> int | None:
    """Return how many processes share a run; None where pytest-xdist is told, or is not there.

    A run of everything has several. One of files or of tests that are named has one: it would be over before others
    have started.
    """
    option: Any = config.option
    told = getattr(option, "numprocesses", 0) is not None or option.dist != "no"
    if told or hasattr(config, "workerinput"):
        return None
    if config.args_source is config.ArgsSource.ARGS or option.keyword or option.collectonly or option.usepdb:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1:
        return None
    return min(cores, PROCESSES) if option.markexpr == DEFAULT else PROCESSES
