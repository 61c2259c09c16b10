"""Metrics of any training loop, without a host sync: a dict of numbers per step, read one step late.

:class:`StepMetrics` makes the rows; the sinks write them, or any object with the methods of
:class:`megascale.metrics.sinks.Sink`.
"""

from megascale.metrics.sinks import CsvFile, TensorBoard, WeightsAndBiases
from megascale.metrics.step_metrics import StepMetrics

__all__ = ["CsvFile", "StepMetrics", "TensorBoard", "WeightsAndBiases"]
