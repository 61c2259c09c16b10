"""StepMetrics: what a step did, recorded in any loop and read late, so that the host never waits for the device."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, MegascaleError
from megascale.host_view import HostView
from megascale.metrics.sinks import Sink
from megascale.parallel import ParallelGroups
from megascale.utils import call_site, validate
from megascale.utils.collectives import group_rank, meet, raise_together

NAMES = {"step", "seconds", "grad_norm", "scale", "skipped", "num_zeros_in_grad", "lr"}


class StepMetrics(AbstractContextManager["StepMetrics"]):
    """Records a row per optimizer step, and hands it to its sinks one step late.

    A row has `step`, the numbers that you pass, `seconds` (wall time since the row before), and of an optimizer of
    megascale `grad_norm` (of the unscaled gradients before clipping; not finite where they were not), `scale` (of this
    step; 1 without a scaler), `skipped` (1 or 0), `num_zeros_in_grad` (with ``config.log_num_zeros_in_grad`` only) and
    `lr` (of the first param group).

    The host learns of a step when the next one is recorded. All ranks make this object together, and call the same
    methods; the first one alone reads, and has sinks. Numbers are those of that rank, so reduce what should be a mean
    over ranks. A sink that fails later is warned of and gets nothing more: training continues, on every rank alike.
    As a context manager it is closed at the end.

    Args:
        optimizer: whose steps are recorded. None: only what you pass is recorded.
        sinks: take the rows. They are opened here.
        start: the number of the first step, such as that of a loaded checkpoint. Make this object after loading.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument that does not fit, or a sink that cannot be opened; on all
            ranks alike.
    """

    def __init__(
        self, optimizer: MegascaleOptimizer | None = None, sinks: Sequence[Sink] = (), *, start: int = 0
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, MegascaleOptimizer):
            raise ArgumentTypeError(f"optimizer must be one of megascale's, or None, got {type(optimizer).__name__}")
        self.step = validate.integer("start", start, minimum=0)
        self._optimizer = optimizer
        group = ParallelGroups.of(None).grad_stats if optimizer is None else optimizer._recipe.groups.grad_stats
        self._is_first = group_rank(group) == 0
        self._view = HostView()
        self._sinks: list[Sink] = []
        # One rank that made this alone would send its error into another collective of the others.
        meet(group, "StepMetrics()")
        error: MegascaleError | None = None
        if not isinstance(sinks, Sequence) or not all(isinstance(sink, Sink) for sink in sinks):
            error = ArgumentTypeError(
                f"sinks must be a list of objects with open(), write() and close(), such as [CsvFile(path)], got "
                f"{sinks!r}"
            )
        for sink in sinks if self._is_first and error is None else ():
            try:
                sink.open(self.step)
                self._sinks.append(sink)
            except (MegascaleError, ImportError, OSError, ValueError) as caught:
                error = error or ArgumentError(f"sinks: {type(sink).__name__} cannot be opened: {caught}")
        raise_together(error, group)
        self._scale = self._current_scale()
        self._recorded_at = time.perf_counter()

    def record(self, **values: Tensor | float) -> dict[str, float] | None:
        """Record the step just taken, after ``optimizer.step()`` and before the schedule's; return the row before.

        ``values``: numbers and one-element tensors on any device, by name. The first call returns None, and so do ranks
        other than the first. Raises ArgumentError for tensors with more elements, and for names that rows have already.
        """
        for name, value in values.items():
            if name in NAMES:
                raise ArgumentError(f"{name} is recorded already, found by itself; pass yours under another name")
            if not isinstance(value, (Tensor, int, float)) or (isinstance(value, Tensor) and value.numel() != 1):
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(f"{name} must be a number or a tensor of one element, got {found}; pass its mean")
        now, row = time.perf_counter(), {"step": self.step, **values}
        result = None if self._optimizer is None else self._optimizer._recipe.last_result
        if self._optimizer is not None and result is not None:
            row |= {"grad_norm": result.grad_norm, "scale": self._scale, "skipped": result.success.logical_not()}
            if self._optimizer._recipe.members[0].config.log_num_zeros_in_grad:
                row["num_zeros_in_grad"] = result.num_zeros_in_grad
            row["lr"] = self._optimizer.param_groups[0]["lr"]
        row["seconds"] = now - self._recorded_at
        self._scale, self._recorded_at, self.step = self._current_scale(), now, self.step + 1
        return self._written(self._view.push(row)) if self._is_first else None

    def close(self) -> dict[str, float] | None:
        """Wait for the row recorded last, hand it out and return it as :meth:`record` does; close all sinks."""
        row = self._written(self._view.flush())
        while self._sinks:
            self._sinks.pop().close()
        return row

    def __exit__(self, *_: object) -> None:
        self.close()

    def _current_scale(self) -> Tensor | float:
        """Return a copy of the scale. This does not count as scaling a loss."""
        scaler = None if self._optimizer is None else self._optimizer.grad_scaler
        return 1.0 if scaler is None else scaler.live_scale.clone()

    def _written(self, row: dict[str, float] | None) -> dict[str, float] | None:
        if row is None:
            return None
        row |= {name: int(row[name]) for name in ("step", "skipped") if name in row}
        for sink in list(self._sinks):
            try:
                sink.write(row)
            except OSError as error:
                self._sinks.remove(sink)
                name = type(sink).__name__
                message = f"{name} cannot write step {row['step']}: {error}; it gets no more metrics in this process"
                call_site.warn(message, RuntimeWarning)
        return row
