"""Metrics of any training loop, without a host sync: loss and whatever you pass, gradient norm, scale, skips, times.

:class:`StepMetrics` is the hook; what it records goes to sinks: :class:`CsvFile`, :class:`TensorBoard`,
:class:`WeightsAndBiases`, or any object with the methods of :class:`Sink`.
"""

from megascale.metrics.boards import TensorBoard, WeightsAndBiases
from megascale.metrics.sinks import CsvFile, Sink
from megascale.metrics.step_metrics import StepMetrics

__all__ = ["CsvFile", "Sink", "StepMetrics", "TensorBoard", "WeightsAndBiases"]
