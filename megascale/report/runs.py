"""Reads what runs leave in their folders: `metrics.csv`, and `overflows.jsonl` where there is one."""

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale.errors import ArgumentError
from megascale.metrics.rows import OVERFLOWS, STEP, TABLE, overflow_of
from megascale.metrics.sinks import whole_lines
from megascale.step.overflow_report import OverflowRow

Series = npt.NDArray[np.float64]
CONFIG, SUMMARY = "config.yaml", "summary.json"
"""Files that `megascale train` writes beside the table."""
REMEDY = "give the folder of a run of python -m megascale.train, or one that megascale.metrics.CsvFile wrote"


@dataclass(frozen=True)
class Run:
    """A run, read.

    Attributes:
        label: what the report calls it. Runs with the same label are drawn alike.
        series: columns of its table by name, each fp64 of shape [steps], in the order of ``series["step"]``; NaN where
            a cell was empty.
        overflows: one row for each gradient that overflowed in a skipped step.
        config: the text of `config.yaml` beside the table; empty without.
        written: when the table was written last, seconds since the epoch; None: unknown.
        seconds: how long the run took, as its `summary.json` says; None: unknown.
    """

    label: str
    series: dict[str, Series]
    overflows: list[OverflowRow] = field(default_factory=list)
    config: str = ""
    written: float | None = None
    seconds: float | None = None

    @property
    def steps(self) -> Series:
        """Step numbers, increasing."""
        return self.series[STEP]

    @property
    def command(self) -> str:
        """What was typed to start the run, the first comment of ``config``; empty: unknown."""
        lines = takewhile(lambda line: line.startswith("#"), self.config.splitlines())
        return "\n".join(line.removeprefix("#").strip() for line in lines)

    def get(self, name: str) -> Series:
        """Return a column, all NaN if the run does not have it."""
        return self.series.get(name, np.full(len(self.steps), np.nan))


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Return the runs in ``paths``, labelled by the shortest ends of their paths that tell them apart.

    A path is a `metrics.csv`, a folder that holds one, or a folder with runs anywhere below it.

    Raises ArgumentError for a file that is missing or is no table of steps, naming it.
    """
    tables = [table for path in paths for table in _tables(Path(path))]
    tables = list(dict.fromkeys(tables))
    runs = [read_run(table) for table in tables]
    return [replace(run, label=label) for run, label in zip(runs, _labels(tables), strict=True)]


def read_run(table: Path) -> Run:
    """Return one run, labelled by its folder. A half-written last line, left by a killed process, is ignored."""
    try:
        with open(table, newline="", encoding="utf-8") as stream:
            rows = list(csv.reader(whole_lines(stream)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"{table} cannot be read as a table of steps: {error}; {REMEDY}") from None
    header = rows.pop(0) if rows else []
    if STEP not in header:
        raise ArgumentError(f"{table} is no table of steps: its first line has no column {STEP!r}; {REMEDY}")
    if not rows:
        raise ArgumentError(f"{table} has no step yet; wait until the run has written one, or leave it out")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ArgumentError(
                f"{table}, line {number} has {len(row)} cells, its first line {len(header)}; remove that line"
            )
    columns = {name: _numbers([row[i] for row in rows], table, name) for i, name in enumerate(header)}
    # Of a step that ran twice, as after a resume, the last row counts.
    _, last = np.unique(columns[STEP][::-1], return_index=True)
    order = len(rows) - 1 - last
    series = {name: values[order] for name, values in columns.items()}
    folder = table.parent
    facts: dict[str, Any] = {
        "config": _text_of(folder / CONFIG),
        "written": table.stat().st_mtime,
        "seconds": _seconds_of(folder),
    }
    return Run(folder.name or str(table), series, _read_overflows(folder / OVERFLOWS), **facts)


def _text_of(path: Path) -> str:
    """Return a file's text; empty if it cannot be read: the report does not depend on it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _seconds_of(folder: Path) -> float | None:
    try:
        seconds = json.loads(_text_of(folder / SUMMARY) or "{}").get("seconds")
    except (ValueError, AttributeError, RecursionError):
        return None
    return float(seconds) if isinstance(seconds, int | float) else None


def _tables(path: Path) -> list[Path]:
    """Return the tables that ``path`` means."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ArgumentError(f"there is no {path}; {REMEDY}")
    found = [path / TABLE] if (path / TABLE).is_file() else sorted(path.rglob(TABLE))
    if not found:
        raise ArgumentError(f"{path} holds no {TABLE}; {REMEDY}")
    return found


def _labels(tables: Sequence[Path]) -> list[str]:
    """Return the ends of the folders' paths, as long as needed to differ."""
    folders = [table.resolve().parent.parts for table in tables]
    if len(set(tables)) < len(tables) or len({*folders}) < len(folders):
        return [str(table) for table in tables]
    length = next(n for n in range(1, 1000) if len({parts[-n:] for parts in folders}) == len(folders))
    return ["/".join(parts[-length:]) for parts in folders]


def _numbers(cells: Sequence[str], table: Path, name: str) -> Series:
    try:
        return np.array([cell or "nan" for cell in cells], dtype=np.float64)
    except ValueError as error:
        raise ArgumentError(f"{table}, column {name}: {error}; a table of steps has numbers only. {REMEDY}") from None


def _read_overflows(path: Path) -> list[OverflowRow]:
    """Return the lines of a file of overflows; none if it is not there."""
    if not path.is_file():
        return []
    try:
        with open(path, encoding="utf-8") as stream:
            return [_overflow(line, path, number) for number, line in enumerate(whole_lines(stream), 1)]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}; move it away to report the run without it") from None


def _overflow(line: str, path: Path, number: int) -> OverflowRow:
    overflow = overflow_of(line)
    if overflow is None:
        raise ArgumentError(
            f"{path}, line {number} is no overflow, an object with step, parameter, num_inf and num_nan; move the file "
            "away to report the run without it"
        )
    return overflow
