"""Logs a run: to metrics.csv and TensorBoard, on request to Weights & Biases, and with a progress bar."""

import math
import sys
from pathlib import Path

import torch.utils.tensorboard as _  # noqa: F401  the program names its own extra where this is missing
from tqdm import tqdm

from megascale.metrics import CsvFile, Sink, TensorBoard, WeightsAndBiases
from megascale.train.config import TrainConfig, as_dict
from megascale.train.rows import (
    GRAD_NORM,
    LR,
    SCALE,
    SKIPPED,
    STEP,
    TABLE,
    ZERO_FRACTION,
    Row,
    overflow_of,
    parsed,
    rows_before,
)
from megascale.utils.atomic_files import atomic_write

LOSS, HELDOUT_LOSS, SAMPLES_PER_SECOND = "loss", "heldout_loss", "samples_per_second"
BATCH_ACCURACY, TOTAL_ACCURACY = "batch_accuracy", "total_accuracy"
COLUMNS = (
    STEP,
    LOSS,
    BATCH_ACCURACY,
    TOTAL_ACCURACY,
    HELDOUT_LOSS,
    GRAD_NORM,
    SCALE,
    SKIPPED,
    ZERO_FRACTION,
    LR,
    SAMPLES_PER_SECOND,
)
"""What a row of a run has.

``batch_accuracy`` is the fraction of the batch's labelled places that the model labels right, before the step;
``total_accuracy`` and ``heldout_loss`` are of all held-out data, at the last evaluation up to the end of this step, NaN
before the first; ``samples_per_second`` is of this step alone, without evaluation and checkpoints.
"""


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
        self._sinks: list[Sink] = [CsvFile(folder / TABLE, COLUMNS), TensorBoard(folder / "tensorboard")]
        if config.wandb != "disabled":
            self._sinks.append(
                WeightsAndBiases(
                    mode=config.wandb,
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
        """Log one step. ``row``: has :data:`COLUMNS`."""
        for sink in self._sinks:
            sink.write(row)
        step, scale, skipped, accuracy = row[STEP], row[SCALE], bool(row[SKIPPED]), row[TOTAL_ACCURACY]
        self._skips += skipped
        if skipped:
            self.say(f"step {step}: skipped at scale {scale:g}, gradients overflowed")
        elif self._after_skip:
            self.say(f"step {step}: landed at scale {scale:g}")
        self._after_skip = skipped
        self._bar.update(1)
        evaluated = "" if math.isnan(accuracy) else f"held-out {row[HELDOUT_LOSS]:.4f} "
        self._bar.set_postfix_str(
            f"loss {row[LOSS]:.4f} {evaluated}scale {scale:g} norm {row[GRAD_NORM]:.3g} "
            f"skips {self._skips} {row[SAMPLES_PER_SECOND]:.0f} samples/s",
            refresh=False,
        )

    def say(self, message: str) -> None:
        """Print a line above the progress bar."""
        self._bar.write(message, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Finish all files, and the line of the progress bar."""
        self._bar.close()
        for sink in self._sinks:
            sink.close()


def rewrite_last_row(config: TrainConfig, step: int, evaluation: dict[str, float]) -> None:
    """Write what was measured later into the row of the last of ``step`` steps, if that exists."""
    rows = rows_before(config.run_folder / TABLE, step)
    if rows and int(rows[-1][STEP]) == step - 1:
        log = RunLog(config, step - 1)
        log.write(parsed(rows[-1]) | evaluation)
        log.close()


def keep_overflows_before(path: Path, step: int) -> None:
    """Remove what the file tells of ``step`` and later ones, which run again, and a line that a kill cut short."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if (row := overflow_of(line)) is not None and row["step"] < step]
    with atomic_write(path, overwrite=True) as unnamed:
        unnamed.write_text("".join(kept), encoding="utf-8")
