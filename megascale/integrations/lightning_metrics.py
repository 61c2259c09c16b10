"""The callback StepMetricsCallback, for either name of Lightning's package."""

from collections.abc import Sequence
from typing import Any

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import UsageError
from megascale.metrics import Sink, StepMetrics

Base: Any = object  # Subclasses also derive from their package's Callback, which super() then finds.


class StepMetricsRecording(Base):
    """Records each optimizer step with :class:`megascale.metrics.StepMetrics`, without a host sync.

    A row has the loss that ``training_step`` returned last, and what StepMetrics finds by itself. Steps are Lightning's
    ``global_step``; a run that resumes replaces the rows of steps that run again. Call
    ``callback.metrics.add(...)`` to add numbers to the row recorded last, such as an evaluation.

    Args:
        sinks: take the rows, such as ``CsvFile(folder)``.

    Raises:
        UsageError: at the start of training, unless the module has one optimizer, and that is megascale's.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        super().__init__()
        self.metrics: StepMetrics | None = None
        self._sinks = sinks
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the sinks."""
        ours = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, MegascaleOptimizer)]
        if len(ours) != 1 or len(trainer.optimizers) != 1:
            kinds = [type(optimizer).__name__ for optimizer in trainer.optimizers]
            raise UsageError(
                f"{type(self).__name__} needs one optimizer of megascale's, found {kinds}: train with "
                "Trainer(plugins=[MegascalePrecision(...)]); with several, use StepMetrics in training_step"
            )
        self._step = trainer.global_step
        self.metrics = StepMetrics(ours[0], self._sinks, start=self._step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Record the step, if this batch ended in one."""
        if self.metrics is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.metrics.record(**({} if loss is None else {"loss": loss}))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the last step and close the sinks."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep what was recorded until then."""
        self._close()

    def _close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None
