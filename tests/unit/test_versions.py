""".ci/versions: what it reads of pytest's output, the table, and what it asks pip for."""

from pathlib import Path

import pytest

from tests import runs

ROOT = Path(__file__).parents[2]


versions = runs.load_script("versions")


@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("== 3 failed, 1200 passed, 30 skipped, 12 deselected, 2 warnings in 812.33s (0:13:32) ==", (1200, 3, 30)),
        ("1 passed in 0.02s\n", (1, 0, 0)),
        ("=== 5 passed, 1 error in 3.10s ===", (5, 1, 0)),
        ("=== 1 failed, 2 errors in 90061.00s (1 day, 1:01:01) ===", (0, 3, 0)),
        ("=== 4 deselected in 0.50s ===", (0, 0, 0)),
        ("no tests ran in 0.01s", (0, 0, 0)),
        ("1 passed in 0.02s\nFAILED test_x - it ended in 3 passed\n== 1 failed in 9.00s ==\nbye", (0, 1, 0)),
        ("Fatal Python error: Segmentation fault", None),
        ("", None),
    ],
)
def test_the_closing_line_is_counted(output: str, counts: tuple[int, int, int] | None) -> None:
    """The last line that says how long the tests took; errors count as failed. Without one nothing is counted."""
    assert runs.closing_counts(output) == counts


def test_the_table_has_a_row_for_each_run() -> None:
    """A run that pip ended, or that crashed, has no counts, but its exit status."""
    both = [
        runs.Run(("2.13.0", "CPU", "3.11.7", "3.9.0"), (1200, 0, 30), 90.0, 0),
        runs.Run(("9.9.9", "not installed", "", ""), None, 0.0, 1),
    ]
    assert runs.table(versions.COLUMNS, both).splitlines() == [
        "| torch | build | Python | triton | passed | failed | skipped | minutes | exit status |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 2.13.0 | CPU | 3.11.7 | 3.9.0 | 1200 | 0 | 30 | 1.5 | 0 |",
        "| 9.9.9 | not installed |  |  |  |  |  | 0.0 | 1 |",
    ]


def test_what_goes_with_a_version_is_asked_for() -> None:
    """Torch 2.11 pins a triton that the tests cannot use; a later one replaces it once torch is there."""
    assert versions.requirements("2.11.0") == ["torch==2.11.0", "-e", f"{ROOT}[test]"]
    assert versions.replacements("2.11.0") == ["--no-deps", "triton>=3.7"]
    assert versions.replacements("2.13.0") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: VERSION"),
        (["2.13.0", "--"], "no argument of pytest follows --"),
        (["2.13.0", "--keep"], "--keep needs --folder"),
    ],
)
def test_misuse_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is downloaded."""
    with pytest.raises(SystemExit):
        versions.main(arguments)
    assert message in capsys.readouterr().err


def test_environments_are_removed_and_failures_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All versions are tried; the exit status tells that one failed; nothing stays on the disk unless it is kept."""
    asked = []

    def install(version: str, options: object, environment: Path, python: str) -> int:
        environment.mkdir()
        asked.append(version)
        return 1

    monkeypatch.setattr(versions, "_install", install)
    assert versions.main(["1.0.0", "2.0.0", "--folder", str(tmp_path)]) == 1
    assert asked == ["1.0.0", "2.0.0"]
    assert list(tmp_path.iterdir()) == []
    assert len(capsys.readouterr().out.splitlines()) == 4
    versions.main(["1.0.0", "--folder", str(tmp_path), "--keep"])
    assert len(list(tmp_path.iterdir())) == 1
