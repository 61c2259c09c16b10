"""Sinks that need another library: TensorBoard, and Weights & Biases. It is imported when the sink opens."""

import os
from typing import Any

from megascale.errors import ArgumentError
from megascale.metrics.rows import STEP, Row


class TensorBoard:
    """Writes each name as a scalar of TensorBoard. Needs `tensorboard`; rows that will come again are hidden.

    Args:
        folder: of the event files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._writer: Any = None

    def open(self, start: int) -> None:
        """Begin at ``start``. Raises ArgumentError if tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "tensorboard":
                raise
            raise ArgumentError(
                f"TensorBoard({self.folder!r}) needs tensorboard, which is not installed: pip install tensorboard"
            ) from None
        self._writer = SummaryWriter(self.folder, purge_step=start)

    def write(self, row: Row) -> None:
        """Add a point to each curve."""
        for name, value in row.items():
            if name != STEP:
                self._writer.add_scalar(name, value, int(row[STEP]))

    def flush(self) -> None:
        """Write everything to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs each row to a run of Weights & Biases. Needs `wandb`.

    Args:
        mode: `offline` writes to ``dir`` only and asks no host; `online` uploads.
        options: further arguments of ``wandb.init``, such as project, name, dir and config.
    """

    def __init__(self, mode: str = "offline", **options: Any) -> None:
        if mode not in ("offline", "online"):
            raise ArgumentError(f"mode must be 'offline' or 'online', got {mode!r}; leave the sink out to log nothing")
        self.mode, self.options = mode, options
        self._run: Any = None

    def open(self, start: int) -> None:
        """Start the run. Raises ArgumentError if wandb is not installed."""
        try:
            import wandb
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise
            raise ArgumentError(
                f"WeightsAndBiases(mode={self.mode!r}) needs wandb, which is not installed: pip install "
                "'megascale[wandb]', or leave the sink out; in the training program, set wandb=disabled"
            ) from None
        self._run = wandb.init(mode=self.mode, **self.options)

    def write(self, row: Row) -> None:
        """Log the values under their step."""
        self._run.log({name: value for name, value in row.items() if name != STEP}, step=int(row[STEP]))

    def flush(self) -> None:
        """Do nothing: wandb writes as it goes."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
