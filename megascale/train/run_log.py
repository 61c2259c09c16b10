"""Logs a run: to metrics.csv and TensorBoard, on request to Weights & Biases, and with a progress bar."""

import json
import math
import sys
from pathlib import Path

import torch.utils.tensorboard as _  # noqa: F401  the program names its own extra where this is missing
from tqdm import tqdm

from megascale.errors import ArgumentError
from megascale.metrics import CsvFile, TensorBoard, WeightsAndBiases
from megascale.metrics.sinks import Sink
from megascale.train.config import TrainConfig, as_dict
from megascale.utils.atomic_files import atomic_write

COLUMNS = (
    *("step", "loss", "batch_accuracy", "total_accuracy", "heldout_loss", "grad_norm", "scale", "skipped"),
    *("zero_grad_fraction", "lr", "samples_per_second"),
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

    Raises:
        ArgumentError, OSError: a file cannot be written, or Weights & Biases is asked for and not installed.
    """

    def __init__(self, config: TrainConfig, start: int) -> None:
        folder, name = config.run_folder, config.run_name
        self._sinks: list[Sink] = [CsvFile(folder / "metrics.csv", COLUMNS), TensorBoard(folder / "tensorboard")]
        if config.wandb != "disabled":
            run = {"mode": config.wandb.value, "project": config.wandb_project, "name": name, "dir": str(folder)}
            self._sinks.append(WeightsAndBiases(**run, config=as_dict(config)))
        try:
            for sink in self._sinks:
                sink.open(start)
        except ModuleNotFoundError as error:
            raise ArgumentError(
                f"wandb={config.wandb} needs {error.name}, which is not installed: pip install 'megascale[wandb]', or "
                "leave it disabled"
            ) from None
        interval = 0.2 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            total=config.steps, initial=start, desc=name, mininterval=interval, file=sys.stderr, dynamic_ncols=True
        )
        self._skips, self._after_skip = 0, False

    def write(self, row: dict[str, float]) -> None:
        """Log one step. ``row``: has :data:`COLUMNS`."""
        for sink in self._sinks:
            sink.write(row)
        step, scale, skipped, accuracy = row["step"], row["scale"], bool(row["skipped"]), row["total_accuracy"]
        self._skips += skipped
        if skipped or self._after_skip:
            what = f"skipped at scale {scale:g}, gradients overflowed" if skipped else f"landed at scale {scale:g}"
            self._bar.write(f"step {step}: {what}", file=sys.stdout)
            sys.stdout.flush()
        self._after_skip = skipped
        self._bar.update(1)
        evaluated = "" if math.isnan(accuracy) else f"held-out {row['heldout_loss']:.4f} "
        self._bar.set_postfix_str(
            f"loss {row['loss']:.4f} {evaluated}scale {scale:g} norm {row['grad_norm']:.3g} "
            f"skips {self._skips} {row['samples_per_second']:.0f} samples/s",
            refresh=False,
        )

    def close(self) -> None:
        """Finish all files, and the line of the progress bar."""
        self._bar.close()
        for sink in self._sinks:
            sink.close()


def keep_overflows_before(path: Path, step: int) -> None:
    """Remove what the file tells of ``step`` and later ones, which run again, and a line that a kill cut short."""
    if not path.exists():
        return
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    with atomic_write(path, overwrite=True) as unnamed:
        unnamed.write_text("".join(line for line in lines if json.loads(line)["step"] < step), encoding="utf-8")
