"""Tools for the question "which layer overflowed?". None of them changes a bit of training."""

from megascale.debug.reporting import OverflowReporter, report_overflows

__all__ = ["OverflowReporter", "report_overflows"]
