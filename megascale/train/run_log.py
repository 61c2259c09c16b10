"""Logs a run: to metrics.csv and TensorBoard, on request to Weights & Biases, and with a progress bar."""

import json
import math
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch.utils.tensorboard as _  # noqa: F401  the program names its own extra where this is missing
from tqdm import tqdm

from megascale.metrics import CsvFile, Sink, TensorBoard, WeightsAndBiases
from megascale.metrics.sinks import FILE_NAME, close_all, rows_before
from megascale.train.config import TrainConfig, as_dict
from megascale.utils.atomic_files import atomic_write


@dataclass(frozen=True)
class Row:
    """One step as all ranks saw it."""

    step: int
    loss: float
    batch_accuracy: float
    """Fraction of the batch's labelled places that the model labels right, before the step."""
    total_accuracy: float
    """The same on all held-out data, at the last evaluation up to the end of this step; NaN before the first."""
    grad_norm: float
    """Of the unscaled gradients."""
    scale: float
    """The loss scale of this step."""
    skipped: int
    zero_grad_fraction: float
    """Fraction of gradient elements that are exactly zero."""
    lr: float
    samples_per_second: float
    """Of this step alone, without evaluation and checkpoints."""


COLUMNS = [column.name for column in fields(Row)]


class RunLog:
    """Writes rows. Only the first rank has one.

    Rows of steps that will be run again are removed from the CSV file and hidden in TensorBoard.

    Args:
        config: names the folder and the run.
        start: the first step that this process will run.
    """

    def __init__(self, config: TrainConfig, start: int) -> None:
        folder = config.run_folder
        folder.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = [CsvFile(folder / FILE_NAME, COLUMNS), TensorBoard(folder / "tensorboard")]
        if config.wandb != "disabled":
            self._sinks.append(
                WeightsAndBiases(
                    config.wandb,
                    project=config.wandb_project,
                    name=config.run_name,
                    dir=str(folder),
                    config=as_dict(config),
                )
            )
        for sink in self._sinks:
            sink.open(start)
        quiet = not sys.stderr.isatty()
        self._bar = tqdm(
            total=config.steps,
            initial=start,
            desc=config.run_name,
            mininterval=10.0 if quiet else 0.2,
            file=sys.stderr,
            dynamic_ncols=True,
        )
        self._skips = 0
        self._after_skip = False

    def write(self, row: Row) -> None:
        """Log one step."""
        values = asdict(row)
        for sink in self._sinks:
            sink.write(values)
        self._skips += row.skipped
        if row.skipped:
            self.say(f"step {row.step}: skipped at scale {row.scale:g}, gradients overflowed")
        elif self._after_skip:
            self.say(f"step {row.step}: landed at scale {row.scale:g}")
        self._after_skip = bool(row.skipped)
        self._bar.update(1)
        evaluated = "" if math.isnan(row.total_accuracy) else f"acc {row.total_accuracy:.4f} "
        self._bar.set_postfix_str(
            f"loss {row.loss:.4f} {evaluated}scale {row.scale:g} norm {row.grad_norm:.3g} "
            f"skips {self._skips} {row.samples_per_second:.0f} samples/s",
            refresh=False,
        )

    def say(self, message: str) -> None:
        """Print a line above the progress bar."""
        self._bar.write(message, file=sys.stdout)
        sys.stdout.flush()

    def flush(self) -> None:
        """Write everything to disk, as before a checkpoint."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Finish all files, and the line of the progress bar."""
        self._bar.close()
        close_all(self._sinks)


def rewrite_last_row(config: TrainConfig, step: int, total_accuracy: float) -> None:
    """Write an accuracy that was measured later into the row of the last of ``step`` steps, if that exists."""
    rows = rows_before(config.run_folder / FILE_NAME, step)
    if rows and int(rows[-1]["step"]) == step - 1:
        read: dict[str, Any] = {
            one.name: (int if one.type is int else float)(rows[-1][one.name]) for one in fields(Row)
        }
        log = RunLog(config, step - 1)
        log.write(replace(Row(**read), total_accuracy=total_accuracy))
        log.close()


def keep_overflows_before(path: Path, step: int) -> None:
    """Remove what the file tells of ``step`` and later ones, which run again, and a line that a kill cut short."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if _step_of(line) < step]
    with atomic_write(path, overwrite=True) as unnamed:
        unnamed.write_text("".join(kept), encoding="utf-8")


def _step_of(line: str) -> float:
    """Return the step of a JSON line, infinity for one that is not whole."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except ValueError:
        return math.inf
