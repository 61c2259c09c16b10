"""Metrics of any training loop, without a host sync: a dict of numbers per step, read one step late.

:class:`StepMetrics` makes the rows; the sinks write them, or any object with the methods of :class:`Sink`.
"""

from megascale.metrics.sinks import CsvFile, Sink, TensorBoard, WeightsAndBiases
from megascale.metrics.step_metrics import StepMetrics

__all__ = ["CsvFile", "Sink", "StepMetrics", "TensorBoard", "WeightsAndBiases"]
