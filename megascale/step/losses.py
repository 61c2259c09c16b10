"""Losses: the losses of a step, kept until the next one; which of them were not finite is read only for a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.utils.dtensors import to_local

MOST_LOSSES = 1024
"""Of more losses between two steps nothing is known: a loop that never steps must not fill the memory."""


@dataclass(frozen=True)
class NonFiniteLoss:
    """A loss that was inf or NaN when ``scale_loss()`` was given it.

    Attributes:
        rank: the global rank that computed it.
        micro_batch: the how many-eth loss of the step it was, from 0.
        value: inf, -inf or NaN.
    """

    rank: int
    micro_batch: int
    value: float

    def __str__(self) -> str:
        return f"{self.value} on rank {self.rank} in micro-batch {self.micro_batch}"


class Losses:
    """References to the losses since the last step. No copy and no read: each is one tensor without its graph.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kept: list[Tensor] = []

    def add(self, losses: Any) -> None:
        """Keep a loss, not scaled, of any shape and floating-point dtype, or those of a list or tuple.

        Of what can be gone through only once, nothing is known.
        """
        given = [losses] if isinstance(losses, Tensor) else losses
        if isinstance(given, (list, tuple)) and all(isinstance(loss, Tensor) for loss in given):
            self.count += len(given)
            if self.count <= MOST_LOSSES:
                self._kept += [loss.detach() for loss in given]
        else:
            self.count += MOST_LOSSES + 1

    def take(self) -> list[Tensor] | None:
        """Return the losses since the last call; None where there was none, or not all of them were kept."""
        kept = self._kept if 0 < self.count <= MOST_LOSSES else None
        self.count, self._kept = 0, []
        return kept


def non_finite_losses(losses: Sequence[Tensor] | None, rank: int) -> tuple[NonFiniteLoss, ...] | None:
    """Return those that are inf or NaN, in their order; None where ``losses`` is None. Waits for the device."""
    if losses is None:
        return None
    found = []
    for index, loss in enumerate(losses):
        values = to_local(loss).flatten()
        bad = values[~torch.isfinite(values)][:1].tolist()
        found += [NonFiniteLoss(rank, index, float(value)) for value in bad]
    return tuple(found)
