"""The callback LossScaleMonitor, for either name of Lightning's package."""

from typing import Any

import torch
from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import UsageError
from megascale.host_view import HostView
from megascale.integrations.lightning_precision import PrecisionRecipe

Base: Any = object  # Subclasses also derive from their package's Callback, which super() then finds.


class LossScaleMonitoring(Base):
    """Logs ``loss_scale``, ``num_skipped_steps`` and ``grad_norm`` after every optimizer step, without a host sync.

    The host learns of a step when the next one has been queued, and of the last one when training ends. Values go to
    ``trainer.callback_metrics``, and every ``log_every_n_steps`` steps to the loggers, under the step they belong to.
    With several optimizers the last two names end in "/0", "/1" and so on. ``num_skipped_steps`` continues from a
    checkpoint; ``grad_norm`` is the norm of the unscaled gradients before clipping, not finite where a step was
    skipped.

    Raises:
        UsageError: at the start of training, if the Trainer has no ``MegascalePrecision``.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, without values of an earlier run."""
        if not isinstance(trainer.precision_plugin, PrecisionRecipe):
            raise UsageError(
                f"{type(self).__name__} needs Trainer(plugins=[MegascalePrecision(...)]), found "
                f"{type(trainer.precision_plugin).__name__}"
            )
        self._view = HostView()
        self._step: int = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Start copying the results of this batch's steps to the host, and log those of the batch before."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, MegascaleOptimizer)]
        watched: dict[str, Tensor | float] = {"step": self._step}
        for index, optimizer in enumerate(optimizers):
            suffix = f"/{index}" if len(optimizers) > 1 else ""
            watched["loss_scale"] = optimizer.get_loss_scale()
            watched[f"num_skipped_steps{suffix}"] = optimizer.num_skipped_steps
            result = trainer.precision_plugin.last_result(optimizer)
            if result is not None:
                watched[f"grad_norm{suffix}"] = result.grad_norm
        self._log(trainer, self._view.push(watched))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the results of the last batch."""
        self._log(trainer, self._view.flush())

    def _log(self, trainer: Any, values: dict[str, float] | None) -> None:
        if values is None:
            return
        step = int(values.pop("step"))
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        if trainer.log_every_n_steps and step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
