"""``transformers.Trainer`` and TRL's trainers in 16 bits, and a callback that records each step.

``class MyTrainer(MegascaleTrainer, SFTTrainer)``, or ``adopt(trainer)`` for one that exists. They are documented in
:mod:`megascale.integrations.transformers_trainer`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from megascale.chained import AnyOptimizer
from megascale.errors import UsageError
from megascale.integrations.transformers_trainer import MegascaleTrainer, adopt
from megascale.metrics import Sink, StepMetrics

_OWN = ("grad_norm", "learning_rate", "epoch")
"""Of what the Trainer logs, what rows have already, or what follows from the step."""


class StepMetricsCallback(TrainerCallback):
    """Records each optimizer step with :class:`megascale.metrics.StepMetrics`, without a host sync.

    ``Trainer(callbacks=[StepMetricsCallback([CsvFile(folder)])])``. A row has what StepMetrics finds by itself; what
    the Trainer logs after a step, such as ``loss`` every ``logging_steps`` and ``eval_loss``, is added to that step's
    row. Steps are the Trainer's ``global_step``; a run that resumes replaces the rows of steps that run again.

    Args:
        sinks: take the rows.

    Raises:
        UsageError: when training begins, unless the Trainer's optimizer is megascale's.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        super().__init__()
        self.metrics: StepMetrics | None = None
        self._sinks = sinks

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the sinks."""
        optimizer = kwargs.get("optimizer")
        if not isinstance(optimizer, AnyOptimizer):  # Accelerate has wrapped it
            optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, AnyOptimizer):
            raise UsageError(
                f"StepMetricsCallback needs an optimizer of megascale's, found {type(optimizer).__name__}: pass it as "
                "Trainer(optimizers=(optimizer, None))"
            )
        self.metrics = StepMetrics(optimizer, self._sinks, start=state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step just taken; the schedule's step follows."""
        if self.metrics is not None:
            self.metrics.record()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Add what is logged to the last step's row."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}
        if self.metrics is not None:
            self.metrics.add(**{name: value for name, value in numbers.items() if name not in _OWN})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last step and close the sinks."""
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None


__all__ = ["MegascaleTrainer", "StepMetricsCallback", "adopt"]
