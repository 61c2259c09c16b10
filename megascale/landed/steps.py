"""StepOutcomes: tells schedules and averages whether steps landed, on the device, without a host sync."""

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
        if success is None:
            if self._counter is None:
                raise UsageError(
                    f"{self._name} does not tell on the device whether its steps land; pass success=..., or build this "
                    "on the megascale optimizer that wraps it"
                )
            if self._counter.steps == self._steps_seen:
                raise UsageError(
                    f"no step of {self._name} since the last call; call it after optimizer.step(), or pass success=..."
                )
            answer: Tensor | bool = self._counter.landings > self._landings_seen
        elif isinstance(success, Tensor) and success.dtype == torch.bool and success.numel() == 1:
            answer = success.detach().reshape(())
        elif isinstance(success, bool):
            answer = success
        else:
            raise ArgumentTypeError(
                f"success must be a bool or a tensor of one bool, such as result.success, got {success!r}; of "
                "found_inf pass found_inf == 0, its opposite"
            )
        self._remember()
        return answer

    def _remember(self) -> None:
        if self._counter is not None:
            self._steps_seen, self._landings_seen = self._counter.steps, self._counter.landings.clone()
