"""Sinks take a row of numbers per step: a table, TensorBoard, Weights & Biases, whose libraries do the writing."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from megascale.errors import ArgumentError
from megascale.utils.atomic_files import temporary_path


@runtime_checkable
class Sink(Protocol):
    """Takes rows on the first rank. No method is called before :meth:`open`, and none on other ranks."""

    def open(self, start: int) -> None:
        """Begin. Rows of the steps from ``start`` on will come, perhaps again: drop those of an earlier process."""

    def write(self, row: Mapping[str, float]) -> None:
        """Take the numbers of one step by name; ``step`` is among them. Names may come and go from step to step."""

    def close(self) -> None:
        """Write everything to disk. Nothing follows."""


class CsvFile:
    """A table with a line per step, written at once, and a column per name; missing numbers are empty cells.

    A new name adds a column, for which the file is written once more. A file that exists keeps the rows of the steps
    before ``start``.

    Args:
        path: the file; folders are created.
        columns: names of the first columns. Others follow as they come.
    """

    def __init__(self, path: str | os.PathLike[str], columns: Sequence[str] = ("step",)) -> None:
        self.path = Path(path)
        self._columns = list(columns)
        self._stream: TextIO | None = None

    def open(self, start: int) -> None:
        """Remove the rows of steps from ``start`` on. Raises ArgumentError if the file holds another kind of table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin(start)

    def write(self, row: Mapping[str, float]) -> None:
        """Add a line."""
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self._begin(math.inf)
        self._writer.writerow(row)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def _begin(self, before: float) -> None:
        """Replace the file by one with all columns and its rows of the steps before that one, and continue it."""
        self.close()
        rows: list[dict[str, str]] = []
        if self.path.is_file():
            with open(self.path, newline="", encoding="utf-8") as stream:
                # A process that was killed may leave a part of its last line.
                reader = csv.DictReader(line for line in stream if line.endswith("\n"))
                if "step" not in (reader.fieldnames or ()):
                    raise ArgumentError(f"path={self.path} exists and is no table of steps; choose another file")
                self._columns += [name for name in reader.fieldnames or () if name not in self._columns]
                rows = [row for row in reader if int(row["step"]) < before]
        unnamed = temporary_path(self.path, "incomplete")
        self._stream = open(unnamed, "w", newline="", encoding="utf-8", buffering=1)  # noqa: SIM115  close() closes it
        self._writer: csv.DictWriter[str] = csv.DictWriter(self._stream, self._columns)
        self._writer.writeheader()
        self._writer.writerows(rows)
        os.replace(unnamed, self.path)


class TensorBoard:
    """Writes scalars of TensorBoard into ``folder``. Needs `tensorboard`; rows that come again are hidden."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    def open(self, start: int) -> None:
        """Begin; see :class:`Sink`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(self.folder, purge_step=start, flush_secs=10)

    def write(self, row: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        for name in row.keys() - {"step"}:
            self._writer.add_scalar(name, row[name], int(row["step"]))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs each row to a run of Weights & Biases. Needs `wandb`.

    Args:
        options: of ``wandb.init``, such as project, name, dir and config. Only ``mode="online"`` uploads anything.
    """

    def __init__(self, **options: Any) -> None:
        self.options = {"mode": "offline", **options}

    def open(self, start: int) -> None:
        """Start the run."""
        import wandb

        self._run: Any = wandb.init(**self.options)

    def write(self, row: Mapping[str, float]) -> None:
        """Log the numbers under their step."""
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
