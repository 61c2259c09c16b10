"""StepOutcomes: tells schedules and averages whether steps landed, on the device, without a host sync."""

from typing import Any

import torch
from torch import Tensor

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentTypeError, UsageError
from megascale.step.result import StepCounter


class StepOutcomes:
    """Tells whether a step has landed since the last call.

    Args:
        optimizer: one of megascale counts on the device which of its steps land. For any other, pass ``success``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._name = type(optimizer).__name__
        self._counter: StepCounter | None = None
        if isinstance(optimizer, MegascaleOptimizer):
            self._counter = optimizer._recipe.members[0].counter
        self._remember()

    def landed(self, success: Tensor | bool | None) -> Tensor | bool:
        """Return ``success``, checked, or, for None, whether any step since the last call landed: bool, 0-d.

        Raises:
            ArgumentTypeError: ``success`` is no bool, or tensor of one bool.
            UsageError: ``success`` is None, and the outcome cannot be known.
        """
        answer = self._counted() if success is None else _checked(success)
        self._remember()
        return answer

    def _counted(self) -> Tensor:
        if self._counter is None:
            raise UsageError(
                f"{self._name} does not tell on the device whether its steps land; pass success=..., or build this on "
                "the megascale optimizer that wraps it"
            )
        if self._counter.steps == self._steps_seen:
            raise UsageError(
                f"no step of {self._name} since the last call; call it after optimizer.step(), or pass success=..."
            )
        return self._counter.landings > self._landings_seen

    def _remember(self) -> None:
        if self._counter is not None:
            self._steps_seen, self._landings_seen = self._counter.steps, self._counter.landings.clone()


def _checked(success: Any) -> Tensor | bool:
    if isinstance(success, bool):
        return success
    if not isinstance(success, Tensor) or success.dtype != torch.bool or success.numel() != 1:
        raise ArgumentTypeError(
            f"success must be a bool or a tensor of one bool, such as result.success, got {success!r}; of "
            "found_inf pass found_inf == 0, its opposite"
        )
    return success.detach().reshape(())
