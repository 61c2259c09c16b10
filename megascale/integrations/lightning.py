"""``import lightning.pytorch``: a precision plugin that trains in 16 bit, and callbacks that log.

``Trainer(plugins=[MegascalePrecision("16-true")], callbacks=[LossScaleMonitor()])``. They are documented in
:mod:`megascale.integrations.lightning_precision`, :mod:`megascale.integrations.lightning_monitor` and
:mod:`megascale.integrations.lightning_metrics`.
"""

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision

from megascale.integrations.lightning_metrics import StepMetricsRecording
from megascale.integrations.lightning_monitor import LossScaleMonitoring
from megascale.integrations.lightning_precision import PrecisionRecipe


class MegascalePrecision(PrecisionRecipe, Precision):  # type: ignore[misc,unused-ignore]
    """A precision plugin for ``lightning.pytorch.Trainer``; see :class:`PrecisionRecipe`."""


class LossScaleMonitor(LossScaleMonitoring, Callback):
    """A callback for ``lightning.pytorch.Trainer``; see :class:`LossScaleMonitoring`."""


class StepMetricsCallback(StepMetricsRecording, Callback):
    """A callback for ``lightning.pytorch.Trainer``; see :class:`StepMetricsRecording`."""


__all__ = ["LossScaleMonitor", "MegascalePrecision", "StepMetricsCallback"]
