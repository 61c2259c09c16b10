"""How whole runs of the tests are cut: into processes, and what is dear into the days of a week.

`@pytest.mark.weekly(minutes=3)` is for a slow test that takes minutes and guards what hardly any change touches.
`pytest -m slow --day 3` leaves out what other days have; seven days in a row run all of them. Tests that share what
takes the minutes, a module's fixture, say so, `weekly("wheels", minutes=2)`, and run on one day.

`@pytest.mark.sampled(3)` is for a test whose many cases repeat one promise with other values: the default run has three
of them, and the others are weekly; with `rest="slow"` they are slow only, and run every day. Where it matters which
ones are quick, say so with `tests/cases.py`.
"""

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

DAYS = 7
PROCESSES = 3
"""Of a run of everything, at most. The default tests keep their cores busy, and have no more processes than cores; slow
tests mostly wait for ranks and programs.
"""


@dataclass(frozen=True)
class Weekly:
    """A test that one day of the week has: its node id, what it shares with others, and minutes on two idle cores."""

    test: str
    shares: str = ""
    minutes: float = 0.05

    @staticmethod
    def of(item: pytest.Item) -> "Weekly | None":
        """Return what the test's mark says; None where it has none.

        Raises:
            TypeError: the mark has other arguments.
        """
        mark = item.get_closest_marker("weekly")
        return None if mark is None else Weekly(item.nodeid, *mark.args, **mark.kwargs)


def days(tests: Iterable[Weekly]) -> dict[str, int]:
    """Return the day of each test by its node id, so that days take about as long as one another.

    The longest comes first, and goes to the day that has least. It depends on names and minutes alone.
    """
    groups: dict[str, list[Weekly]] = {}
    for test in tests:
        groups.setdefault(test.shares or test.test, []).append(test)
    minutes = {name: max(test.minutes for test in group) for name, group in groups.items()}
    taken = [0.0] * DAYS
    found: dict[str, int] = {}
    for name in sorted(groups, key=lambda name: (-minutes[name], name)):
        day = taken.index(min(taken))
        taken[day] += minutes[name]
        found |= {test.test: day for test in groups[name]}
    return found


@dataclass(frozen=True)
class Sampled:
    """What a test's mark says: how many cases the default run has, and the mark of the others."""

    number: int
    rest: str = "weekly"

    @staticmethod
    def of(item: pytest.Item) -> "Sampled | None":
        """Return what the test's mark says; None where it has none.

        Raises:
            TypeError: the mark has other arguments.
        """
        mark = item.get_closest_marker("sampled")
        return None if mark is None else Sampled(*mark.args, **mark.kwargs)


def mark_what_is_not_sampled(items: Sequence[pytest.Item]) -> None:
    """Mark cases of sampled tests that are not in the sample; those that are slow are in none."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if Sampled.of(item) is not None and not any(map(item.get_closest_marker, ("slow", "weekly"))):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, found in tests.items():
        if (sampled := Sampled.of(found[0])) is not None:
            chosen = set(_sample([item.nodeid for item in found], sampled.number, name))
            for item in found:
                if item.nodeid not in chosen:
                    item.add_marker(getattr(pytest.mark, sampled.rest))


def _sample(tests: Iterable[str], number: int, seed: str) -> list[str]:
    """Return node ids, in which each value of each parameter is found if they are enough. Drawn by ``seed`` alone."""
    left = sorted(tests)
    random.Random(seed).shuffle(left)
    values = {test: _values(test) for test in left}
    chosen: list[str] = []
    seen: set[str] = set()
    while left and len(chosen) < number:
        newest = max(left, key=lambda test: len(values[test] - seen))
        left.remove(newest)
        chosen.append(newest)
        seen |= values[newest]
    return chosen


def _values(test: str) -> set[str]:
    """Return the values of a case, as pytest writes them."""
    return set(test.partition("[")[2].removesuffix("]").split("-"))


def left_for(day: int, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return those of the tests that another day has."""
    of = days(weekly for item in items if (weekly := Weekly.of(item)) is not None)
    return [item for item in items if of.get(item.nodeid, day) != day]


def day(text: str) -> int:
    """Read the option ``--day``: 0 to 6.

    Raises:
        ValueError: it is something else.
    """
    number = int(text)
    if number not in range(DAYS):
        raise ValueError(text)
    return number


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
    return min(cores, PROCESSES) if option.markexpr == "not slow" else PROCESSES
