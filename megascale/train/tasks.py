"""Task: a model, batches that depend only on seed and step, and held-out data."""

from typing import NamedTuple, Protocol

from torch import Tensor, nn


class Batch(NamedTuple):
    """Samples on the CPU.

    Attributes:
        inputs: shape [samples, ...]; floating inputs are fp32 and cast to the model's dtype by the trainer.
        targets: int64 class of every labelled place, shape [samples, ...].
    """

    inputs: Tensor
    targets: Tensor


class Task(Protocol):
    """A classification of many places per sample; the model's logits have shape [samples, classes, ...]."""

    num_heldout: int

    def model(self) -> nn.Module:
        """Return the model in fp32, its initial weights decided by torch's global generator."""

    def batch(self, step: int, first: int, last: int) -> Batch:
        """Return samples ``first`` to ``last`` of the global batch of ``step``: a function of only seed and step."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over all places, in fp32, of fp32 logits."""

    def heldout(self, first: int, last: int) -> Batch:
        """Return held-out samples ``first`` to ``last`` of ``num_heldout``."""

    def told(self, accuracy: float, loss: float) -> str:
        """Return what an evaluation of all held-out data has found, in words."""
