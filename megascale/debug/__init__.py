"""Tools for the question "which layer overflowed?". None of them changes a bit of training."""

from megascale.debug.modules import watch
from megascale.debug.reporting import report_overflows
from megascale.debug.underflow import UnderflowMeter

__all__ = ["UnderflowMeter", "report_overflows", "watch"]
