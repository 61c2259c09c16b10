"""Logs a run: to metrics.csv and TensorBoard, on request to Weights & Biases, and with a progress bar."""

import csv
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from megascale.errors import ArgumentError
from megascale.train.config import TrainConfig, as_dict


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
        self._file, self._csv = _open_csv(folder / "metrics.csv", start)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
        self._wandb = _start_wandb(config)
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
        self._csv.writerow(values)
        for name, value in values.items():
            if name != "step":
                self._board.add_scalar(name, value, row.step)
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in values.items() if name != "step"}, step=row.step)
        self._skips += row.skipped
        if row.skipped:
            self.say(f"step {row.step}: skipped at scale {row.scale:g}, gradients overflowed")
        elif self._after_skip:
            self.say(f"step {row.step}: landed at scale {row.scale:g}")
        self._after_skip = bool(row.skipped)
        self._bar.update(1)
        self._bar.set_postfix_str(
            f"loss {row.loss:.4f} acc {row.total_accuracy:.4f} scale {row.scale:g} norm {row.grad_norm:.3g} "
            f"skips {self._skips} {row.samples_per_second:.0f} samples/s",
            refresh=False,
        )

    def say(self, message: str) -> None:
        """Print a line above the progress bar."""
        self._bar.write(message, file=sys.stdout)
        sys.stdout.flush()

    def flush(self) -> None:
        """Write everything to disk, as before a checkpoint."""
        self._file.flush()
        self._board.flush()

    def close(self) -> None:
        """Finish all files."""
        self._bar.close()
        self._file.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def rewrite_last_row(config: TrainConfig, step: int, total_accuracy: float) -> None:
    """Write an accuracy that was measured later into the row of the last of ``step`` steps, if that exists."""
    rows = _rows_before(config.run_folder / "metrics.csv", step)
    if rows and int(rows[-1]["step"]) == step - 1:
        read: dict[str, Any] = {
            one.name: (int if one.type is int else float)(rows[-1][one.name]) for one in fields(Row)
        }
        log = RunLog(config, step - 1)
        log.write(replace(Row(**read), total_accuracy=total_accuracy))
        log.close()


def _open_csv(path: Path, start: int) -> tuple[Any, "csv.DictWriter[str]"]:
    """Open the file for rows from ``start`` on, keeping earlier ones.

    The file on disk always has the earlier rows, as this process may be killed before it flushes any.
    """
    kept = _rows_before(path, start)
    replacement = path.with_suffix(".csv.new")
    with open(replacement, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(kept)
    os.replace(replacement, path)
    stream = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115  closed by RunLog.close
    return stream, csv.DictWriter(stream, COLUMNS)


def _rows_before(path: Path, step: int) -> list[dict[str, str]]:
    """Return the rows of the steps before ``step``."""
    if step == 0 or not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as stream:
        return [row for row in csv.DictReader(stream) if _is_whole(row) and int(row["step"]) < step]


def _is_whole(row: Mapping[str, str | None]) -> bool:
    """Return whether no cell is missing. A killed process may leave a partial line, even a partial step number."""
    return None not in row.values() and str(row["step"]).isdigit()


def _start_wandb(config: TrainConfig) -> Any:
    if config.wandb == "disabled":
        return None
    try:
        import wandb
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ArgumentError(
            f"wandb={config.wandb} needs Weights & Biases: pip install 'megascale[wandb]', or set wandb=disabled"
        ) from None
    return wandb.init(
        project=config.wandb_project,
        name=config.run_name,
        dir=str(config.run_folder),
        mode=config.wandb,
        config=as_dict(config),
    )
