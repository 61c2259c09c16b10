"""Sink: takes rows of metrics, one for each step. CsvFile: a sink that writes a table."""

import contextlib
import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from megascale.errors import ArgumentError
from megascale.metrics.rows import STEP, TABLE, Row


class Sink(Protocol):
    """Takes rows on the first rank. No method is called before :meth:`open`, and none on other ranks."""

    def open(self, start: int) -> None:
        """Begin. Rows of the steps from ``start`` on will come, perhaps again: drop those of an earlier process.

        Raises ArgumentError, or OSError, where nothing can be written.
        """

    def write(self, row: Row) -> None:
        """Take the values of one step. Names may come and go from step to step."""

    def flush(self) -> None:
        """Write everything to disk, as before a checkpoint."""

    def close(self) -> None:
        """Finish. Nothing follows."""


class CsvFile:
    """A table with one line for each step and one column for each name.

    Missing values are empty cells. A new name adds a column, for which the file is written once more. A file that
    exists keeps the rows of the steps before ``start``.

    Args:
        path: the file, or the folder in which it is called `metrics.csv`; folders are created.
        columns: names of the first columns. Others follow as they come.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] = (STEP,)) -> None:
        given = Path(path)
        self.path = given if given.suffix == ".csv" else given / TABLE
        self._columns = list(columns)
        self._stream: TextIO | None = None

    def open(self, start: int) -> None:
        """Remove the rows of steps from ``start`` on. The file on disk has the earlier ones at any moment.

        Raises ArgumentError if the file holds another kind of table, or cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(rows_before(self.path, start))
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"path={self.path} cannot be written: {error}; choose another file") from None

    def write(self, row: Row) -> None:
        """Add a line."""
        new = [name for name in row if name not in self._columns]
        if new:
            self.flush()
            kept = rows_before(self.path, None)
            self._columns += new
            self._begin(kept)
        self._writer.writerow(row)

    def flush(self) -> None:
        """Write everything to disk."""
        if self._stream is not None:
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _begin(self, kept: Sequence[Mapping[str, str]]) -> None:
        """Replace the file by one with all columns and the rows ``kept``, and continue it."""
        self.close()
        self._columns += [name for row in kept[:1] for name in row if name not in self._columns]
        replacement = self.path.with_name(self.path.name + ".new")
        with open(replacement, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self._columns)
            writer.writeheader()
            writer.writerows(kept)
        os.replace(replacement, self.path)
        self._stream = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._writer: csv.DictWriter[str] = csv.DictWriter(self._stream, self._columns)


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


def close_all(sinks: Sequence[Sink]) -> None:
    """Close ``sinks``, each of them even if another one cannot be closed."""
    with contextlib.ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
