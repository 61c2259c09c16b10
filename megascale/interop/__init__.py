"""Reads other systems' checkpoints (loss scalers, main params, moments) without executing code in them.

:func:`load_scaler_state` reads a scaler's state from any of them; :func:`convert` writes a whole optimizer's state as
ours. There is one module per format, over :mod:`~megascale.interop.files` (reading),
:mod:`~megascale.interop.scaler_state` (scalers) and :mod:`~megascale.interop.named_state` (main params and moments).
"""

from megascale.interop.conversion import convert
from megascale.interop.deepspeed_scaler import DeepSpeedGradScaler
from megascale.interop.loading import load_scaler_state

__all__ = ["DeepSpeedGradScaler", "convert", "load_scaler_state"]
