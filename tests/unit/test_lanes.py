"""Lanes lose no test: what `.ci/run` leaves out on one day, it runs on another day of the week."""

import os
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.lanes import DAYS, PROCESSES, Weekly, days, processes

RUN = Path(__file__).parents[2] / ".ci/run"


class Item:
    """What is asked of a collected test: its name and marks."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = nodeid
        self.marks = {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        """Return the mark of that name."""
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        """Take one more mark."""
        self.marks[mark.name] = mark.mark


def _items() -> list[Item]:
    """Tests without a mark, slow ones, and weekly ones of every kind."""
    weekly = pytest.mark.weekly
    return [
        Item("quick.py::test"),
        Item("slow.py::test", pytest.mark.slow),
        *(Item(f"many.py::test[{index}]", weekly) for index in range(30)),
        *(Item(f"dear.py::test[{index}]", weekly(minutes=3)) for index in range(9)),
        *(Item(f"wheels.py::test[{index}]", weekly("wheels", minutes=2)) for index in range(5)),
    ]


def _run_on(day: int | None, items: list[Any]) -> list[str]:
    """Return the names of those that are left when all of ``items`` have been collected."""
    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(getoption={"day": day}.__getitem__, hook=hook)
    left = list(items)
    conftest.pytest_collection_modifyitems(config, left)
    assert sorted([*left, *deselected], key=items.index) == items
    assert all("slow" in item.marks for item in left if "weekly" in item.marks)
    return [item.nodeid for item in left]


def test_seven_days_in_a_row_run_every_test() -> None:
    """Each weekly test on one day, all others on each; without a day all. The order of collection does not matter."""
    items = _items()
    names = [item.nodeid for item in items]
    assert _run_on(None, items) == names
    of_days = [_run_on(day, items) for day in range(DAYS)]
    weekly = names[2:]
    assert sorted(name for day in of_days for name in day if name in weekly) == sorted(weekly)
    assert all(day[:2] == names[:2] for day in of_days)
    random.Random(0).shuffle(items)
    assert [sorted(_run_on(day, items)) for day in range(DAYS)] == [sorted(day) for day in of_days]


def test_days_take_alike_long_and_what_shares_stays_together() -> None:
    """No day has more than the dearest test above another's; one fixture is made on one day."""
    tests = [weekly for item in _items() if (weekly := Weekly.of(item)) is not None]  # type: ignore[arg-type]
    of = days(tests)
    minutes = [sum(test.minutes for test in tests if of[test.test] == day and not test.shares) for day in range(DAYS)]
    wheels = {of[test.test] for test in tests if test.shares}
    assert len(wheels) == 1
    minutes[wheels.pop()] += 2
    assert max(minutes) - min(minutes) <= 3


@pytest.mark.parametrize("mark", [pytest.mark.weekly(hours=1), pytest.mark.weekly("shares", 2, 3)])
def test_a_mark_that_says_something_else_is_an_error(mark: pytest.MarkDecorator) -> None:
    """A misspelt mark would be taken for a test that costs nothing."""
    with pytest.raises(TypeError):
        Weekly.of(Item("test", mark))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "cores", "expected"),
    [
        ({}, 2, 2),
        ({}, 16, PROCESSES),
        ({"markexpr": "slow"}, 2, PROCESSES),
        ({"markexpr": "slow"}, 1, None),
        ({}, 1, None),
        ({"numprocesses": 0}, 2, None),
        ({"numprocesses": 5}, 2, None),
        ({"dist": "worksteal"}, 2, None),
        ({"keyword": "name"}, 2, None),
        ({"collectonly": True}, 2, None),
        ({"usepdb": True}, 2, None),
        ({"args_source": pytest.Config.ArgsSource.ARGS}, 2, None),
        ({"workerinput": {}}, 2, None),
    ],
    ids=str,
)
def test_runs_of_everything_have_several_processes(
    changed: dict[str, Any], cores: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of what is named, which several would only begin later, nor on one core, nor where -n has been told."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    options = {"numprocesses": None, "dist": "no", "collectonly": False, "usepdb": False, "keyword": ""}
    options["markexpr"] = "not slow"
    option = SimpleNamespace(**{name: changed.get(name, value) for name, value in options.items()})
    source = pytest.Config.ArgsSource
    others = {name: value for name, value in changed.items() if name not in options}
    config: Any = SimpleNamespace(**{"ArgsSource": source, "args_source": source.TESTPATHS, "option": option} | others)
    assert processes(config) == expected


def test_without_xdist_there_is_one_process() -> None:
    """Its options are not there then."""
    assert processes(SimpleNamespace(option=SimpleNamespace())) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [["some"], ["all", "more"], ["--day"], ["--day", "7"], ["--day", "1", "2"]])
def test_ci_says_what_it_takes(arguments: list[str]) -> None:
    """Before it does anything."""
    done = subprocess.run(["bash", RUN, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: .ci/run [all | --day N]")


def test_a_sample_has_every_value_and_leaves_no_case_out() -> None:
    """Each value of each parameter is in the default run; all other cases are there, on a day of the week."""
    mark = pytest.mark.sampled(3)
    items = [Item(f"many.py::test[{letter}-{digit}]", mark) for letter in "abc" for digit in (1, 2)]
    assert len(_run_on(None, items)) == 6
    quick = [item.nodeid for item in items if "slow" not in item.marks]
    assert len(quick) == 3
    assert {value for test in quick for value in test[len("many.py::test[") : -1].split("-")} == {*"abc12"}
    assert all("weekly" in item.marks for item in items if "slow" in item.marks)


def test_a_sample_is_the_same_everywhere() -> None:
    """In any order of collection; a case that was slow before is not drawn; what is left may be slow on every day."""
    samples = []
    for seed in range(3):
        items = [Item(f"many.py::test[{index}]", pytest.mark.sampled(2, "slow")) for index in range(9)]
        slow = Item("many.py::test[slow]", pytest.mark.sampled(2, "slow"), pytest.mark.slow)
        items.insert(seed, slow)
        random.Random(seed).shuffle(items)
        _run_on(None, items)
        samples.append({item.nodeid for item in items if "slow" not in item.marks})
        assert not any("weekly" in item.marks for item in items)
    assert len(samples[0]) == 2
    assert samples == [samples[0]] * 3


def test_a_sample_of_one_case_is_that_case() -> None:
    """As where somebody names one to run it."""
    item = Item("many.py::test[2]", pytest.mark.sampled(1))
    _run_on(None, [item])
    assert "slow" not in item.marks


def test_programs_that_tests_start_may_keep_bytecode() -> None:
    """Or else each of them compiles the library anew."""
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ


def test_the_simulated_device_is_started_by_one_process() -> None:
    """Files that use it are one scope of the schedule; each other file is one of its own."""
    scheduling = pytest.importorskip("tests.scheduling", reason="needs pytest-xdist")
    scopes = scheduling.ByFile._split_scope
    device = {scopes(None, f"tests/unit/{name}::test") for name in ("fake_device/test_amp.py", "test_descriptions.py")}
    assert device == {scheduling.DEVICE}
    assert scopes(None, "tests/unit/test_lanes.py::test[a::b]") == "tests/unit/test_lanes.py"
