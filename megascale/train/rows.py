"""The rows that a run leaves: one of each step in its table, one of each gradient that made a step skip."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from megascale.errors import ArgumentError

TABLE, OVERFLOWS = "metrics.csv", "overflows.jsonl"
"""Names of the two files in a run's folder."""

Row = Mapping[str, float]
"""Values of one step by name; ``step`` is among them."""

STEP, SECONDS, SKIPPED, ZERO_FRACTION = "step", "seconds", "skipped", "zero_grad_fraction"
GRAD_NORM, SCALE, LR = "grad_norm", "scale", "lr"
PHASE = "seconds/"
"""Start of the names of phases' times."""
SUCCESS, ZEROS = "success", "num_zeros_in_grad"
"""Fields of a :class:`megascale.StepResult`, which :func:`row_of` writes as ``skipped`` and ``zero_grad_fraction``."""
WHOLE = (STEP, SKIPPED)
"""Names whose values are integers."""


def row_of(seen: Mapping[str, float], numel: int) -> dict[str, float]:
    """Return what the host has read of a step as a row. ``numel``: gradient elements, of which zeros are a share."""
    row: dict[str, float] = {}
    for name, value in seen.items():
        if name == SUCCESS:
            row[SKIPPED] = int(not value)
        elif name == ZEROS:
            row[ZERO_FRACTION] = value / max(numel, 1)
        else:
            row[name] = int(value) if name in WHOLE else value
    return row


def parsed(cells: Mapping[str, str]) -> dict[str, float]:
    """Return a line of a table as the row that was written; empty cells are left out. Raises ValueError."""
    return {name: (int if name in WHOLE else float)(cell) for name, cell in cells.items() if cell}


def overflow_of(line: str) -> dict[str, Any] | None:
    """Return the row in a line of a file of overflows; None for anything else, such as a line that was cut short."""
    try:
        read = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) and isinstance(read.get("step"), int) else None


def rows_before(path: Path, step: int | None) -> list[dict[str, str]]:
    """Return the rows of the steps before ``step`` (None: all) that a file holds; none if it is not there.

    Raises ArgumentError if it is no table of steps.
    """
    if step == 0 or not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(whole_lines(stream))
        if STEP not in (reader.fieldnames or ()):
            raise ArgumentError(
                f"path={path} exists and is no table of steps: it has no column {STEP!r}; choose another file"
            )
        return [row for row in reader if _is_whole(row) and (step is None or int(row[STEP]) < step)]


def whole_lines(stream: TextIO) -> Iterator[str]:
    """Yield lines, but not a last one without its end: a killed process may leave a part of a line."""
    return (line for line in stream if line.endswith("\n"))


def _is_whole(row: Mapping[str, str | None]) -> bool:
    """Return whether no cell is missing."""
    return None not in row.values() and str(row[STEP]).isdigit()
