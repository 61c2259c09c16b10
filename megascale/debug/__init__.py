"""Tools for the question "which layer overflowed?". None of them changes a bit of training."""

from megascale.debug.modules import ModuleWatch, watch
from megascale.debug.reporting import OverflowReporter, report_overflows
from megascale.debug.underflow import UnderflowMeter
from megascale.step.overflow_report import NonFiniteModule, TensorStatistics

__all__ = [
    "ModuleWatch",
    "NonFiniteModule",
    "OverflowReporter",
    "TensorStatistics",
    "UnderflowMeter",
    "report_overflows",
    "watch",
]
