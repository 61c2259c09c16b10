"""No test is lost: each is in the default run, in `.ci/run` or in `.ci/release`, and in one of them only."""

import re
import tomllib
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.distributed.conftest import NOT_SIMULATED
from tests.levels import DEFAULT, UNKNOWN_CASES

ROOT = Path(__file__).parents[2]
PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


def _of_whole_runs(script: str) -> list[str]:
    """Return the expressions of a script's runs of all tests, which name no file."""
    return re.findall(r'-m pytest -m "([^"]+)"(?! -| tests| \\)', (ROOT / ".ci" / script).read_text())


def _takes(run: str, marks: set[str]) -> bool:
    def is_marked(name: str, /, **_: object) -> bool:
        return name in marks

    return Expression.compile(run).evaluate(is_marked)


def test_each_level_has_one_run() -> None:
    """Whatever marks a test has, one of the expressions takes it: none is in neither script, none in both."""
    default = PYTEST["addopts"][PYTEST["addopts"].index("-m") + 1]
    assert default == DEFAULT
    runs = [default, *_of_whole_runs("run"), *_of_whole_runs("release")]
    assert len(runs) == 3
    for slow, release in product([False, True], repeat=2):
        marks = {name for name, marked in (("slow", slow), ("release", release)) if marked}
        taken = [run for run in runs if _takes(run, marks)]
        assert len(taken) == 1, (marks, taken)


def test_marks_are_levels_or_needs() -> None:
    """No other mark leaves tests out: what a test needs of the machine skips it with a reason, see tests/needs.py."""
    assert PYTEST["testpaths"] == ["tests"]
    marks = {line.partition(":")[0].partition("(")[0] for line in PYTEST["markers"]}
    assert marks == {"default", "slow", "release", "gpu", "native", "c_compiler"}


def test_every_script_is_run() -> None:
    """`.ci/run` and `.ci/release` name every other program of the checks."""
    scripts = {path.name for path in (ROOT / ".ci").iterdir()}
    text = "".join((ROOT / ".ci" / name).read_text() for name in ("run", "release"))
    assert {name for name in scripts - {"run", "release"} if f".ci/{name}" not in text} == set()


def test_default_names_cases_that_exist(request: pytest.FixtureRequest) -> None:
    """A case that has another name now would leave the default run in silence."""
    config = request.config
    if not hasattr(config, "workerinput") and config.args_source is not config.ArgsSource.TESTPATHS:
        pytest.skip("a run of some tests does not see all cases")
    assert config.stash[UNKNOWN_CASES] == set()


def test_what_is_not_simulated_is_there() -> None:
    """A pattern of the tests that run on gloo alone names one that is left."""
    for pattern in (pattern for patterns in NOT_SIMULATED.values() for pattern in patterns):
        file, _, test = pattern.partition("::")
        name = test.partition("*")[0]
        texts = [path.read_text() for path in (ROOT / "tests/distributed").glob(file.partition(".py")[0] + ".py")]
        assert any(f"def {name}" in text for text in texts), pattern
