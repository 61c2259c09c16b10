"""``import lightning.pytorch``: a precision plugin that trains in 16 bit, and a callback that logs.

``Trainer(plugins=[MegascalePrecision("16-true")], callbacks=[LossScaleMonitor()])``. They are documented in
:mod:`megascale.integrations.lightning_precision` and :mod:`megascale.integrations.lightning_monitor`.
"""

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision

from megascale.integrations.lightning_monitor import LossScaleMonitoring
from megascale.integrations.lightning_precision import PrecisionRecipe


class MegascalePrecision(PrecisionRecipe, Precision):  # type: ignore[misc,unused-ignore]
    """A precision plugin for ``lightning.pytorch.Trainer``; see :class:`PrecisionRecipe`."""


class LossScaleMonitor(LossScaleMonitoring, Callback):
    """A callback for ``lightning.pytorch.Trainer``; see :class:`LossScaleMonitoring`."""


__all__ = ["LossScaleMonitor", "MegascalePrecision"]
