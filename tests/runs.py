"""Whole runs of the default tests, as `.ci/versions` and `.ci/machines` make them: each is a row of one table.

Only what Python brings is used: the interpreter that starts them may have nothing else.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTED = ("passed", "failed", "skipped", "minutes", "exit status")


@dataclass
class Run:
    """One row of a table.

    Attributes:
        facts: what was run, one text for each column before the counts.
        counts: passed, failed (with errors), skipped; None where pytest did not close.
        seconds: of the tests, without the installation.
        status: pytest's exit status, or pip's.
    """

    facts: tuple[str, ...]
    counts: tuple[int, int, int] | None
    seconds: float
    status: int


def run_tests(
    facts: tuple[str, ...], command: Sequence[str], environment: Mapping[str, str], tests: Sequence[str] = ()
) -> Run:
    """Run pytest by its command, with more arguments, and return its row of the table."""
    begun = time.monotonic()
    status, output = shown([*command, *tests], environment)
    return Run(facts, closing_counts(output), time.monotonic() - begun, status)


def closing_counts(output: str) -> tuple[int, int, int] | None:
    """Return how many tests passed, failed and were skipped, as pytest's closing line says; None if there is none.

    Errors, as of a fixture, count as failed.
    """
    lines = [line for line in output.splitlines() if re.search(r"\bin \d+\.\d+s( \([\d:, a-z]+\))?( =+)?$", line)]
    if not lines:
        return None
    counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", lines[-1].rpartition(" in ")[0])}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return counts.get("passed", 0), failed, counts.get("skipped", 0)


def table(columns: Sequence[str], runs: Sequence[Run]) -> str:
    """Return a Markdown table, one row for each run. ``columns``: the names of what its facts are."""
    rows = [(*columns, *COUNTED), ("---",) * (len(columns) + len(COUNTED))]
    for run in runs:
        counts = ("", "", "") if run.counts is None else map(str, run.counts)
        rows.append((*run.facts, *counts, f"{run.seconds / 60:.1f}", str(run.status)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def variables(**more: str) -> dict[str, str]:
    """Return the environment variables of a command: without those that lead Python out of its environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")} | more


def shown(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command in the root, show what it prints as it comes, and return its exit status and output."""
    print(f"\n=== {' '.join(command)}", file=sys.stderr, flush=True)
    output = b""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read1():  # type: ignore[attr-defined]
            output += chunk
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()
    return process.returncode, output.decode(errors="replace")


def split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Return the arguments before the first ``--``, whether there is one, and those after it."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), at < len(arguments), list(arguments[at + 1 :])
