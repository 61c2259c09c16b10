"""The rows that a run leaves: one of each step in its table, one of each gradient that made a step skip in a JSON file.

:class:`megascale.metrics.StepMetrics` and ``megascale train`` write the first kind, :mod:`megascale.debug` the second.
"""

import json
from collections.abc import Mapping
from typing import cast

from megascale.step.overflow_report import OverflowRow

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


def overflow_of(line: str) -> OverflowRow | None:
    """Return the row in a line of a file of overflows, None in what it lacks but step and parameter.

    None for anything else, such as a line that was cut short.
    """
    try:
        read = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not all(isinstance(read.get(key), int | None) for key in ("num_inf", "num_nan")):
        return None
    if not isinstance(read.get("step"), int) or not isinstance(read.get("parameter"), str):
        return None
    return cast(OverflowRow, {name: read.get(name) for name in OverflowRow.__annotations__})
