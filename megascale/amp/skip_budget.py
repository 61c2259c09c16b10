"""The budgets of a GradScaler: a run whose gradients overflow without end stops with an error."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale.errors import MinScaleError, SkippedStepsError
from megascale.host_view import HostView, known_values
from megascale.step.overflow_report import OverflowReport
from megascale.step.stalls import ROUNDING, WHY_SKIPPED
from megascale.utils import validate


class SkipBudget:
    """Counts skipped steps in a row, and those at the smallest scale; raises where there are too many.

    A pickled or copied one begins to count anew.

    Args:
        max_consecutive_skips: how many skips in a row are tolerated; None: any number.
        max_overflows_at_min_scale: how many overflows in a row at the smallest scale; None: any number.
        min_scale: that scale; None: the scale is constant.

    Raises:
        ArgumentError, ArgumentTypeError: for an argument out of range, naming it.
    """

    def __init__(
        self, max_consecutive_skips: int | None, max_overflows_at_min_scale: int | None, min_scale: float | None
    ) -> None:
        if max_consecutive_skips is not None:
            validate.integer("max_consecutive_skips", max_consecutive_skips, minimum=1)
        if max_overflows_at_min_scale is not None:
            validate.integer("max_overflows_at_min_scale", max_overflows_at_min_scale, minimum=1)
        self._limits = max_consecutive_skips, max_overflows_at_min_scale, min_scale
        self._skips = self._at_floor = 0
        self._view = HostView()

    def __reduce__(self) -> tuple[type["SkipBudget"], tuple[Any, ...]]:
        return SkipBudget, self._limits

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to count."""
        return self._limits[:2] != (None, None)

    def count(self, found_inf: Tensor, scale: Tensor) -> None:
        """Count one step, before its loss scale changes.

        Args:
            found_inf: fp32, 0-d. On an accelerator the host learns of it, and of its scale, at the next step.
            scale: fp32, one element.
        """
        row = torch.stack([found_inf.reshape(()), scale.reshape(())])
        found, at = known_values(row, self._view, late=row.device.type != "cpu") or (0.0, 0.0)
        _, _, lowest = self._limits
        self._skips = self._skips + 1 if found else 0
        self._at_floor = self._at_floor + 1 if found and lowest is not None and at <= lowest * ROUNDING else 0

    def check(self, last_overflow: Callable[[], OverflowReport | None]) -> None:
        """Raise where a budget is exceeded, on every rank that has the same `found_inf`, naming the worst parameters.

        ``last_overflow``: returns the report of all ranks, which call it together.

        Raises:
            MinScaleError: for more overflows in a row at the smallest scale than are allowed.
            SkippedStepsError: for more skips in a row than are allowed.
        """
        most_skips, most_at_floor, lowest = self._limits
        if most_at_floor is not None and self._at_floor > most_at_floor:
            raise MinScaleError(
                f"{self._at_floor} steps in a row overflowed at the smallest loss scale, {lowest}, "
                f"max_overflows_at_min_scale of the GradScaler allows {most_at_floor}: {WHY_SKIPPED}, or train in bf16"
                f"{_worst(last_overflow())}"
            )
        if most_skips is not None and self._skips > most_skips:
            raise SkippedStepsError(
                f"{self._skips} steps in a row were skipped, max_consecutive_skips of the GradScaler allows "
                f"{most_skips}: {WHY_SKIPPED}{_worst(last_overflow())}"
            )


def _worst(report: OverflowReport | None) -> str:
    return "" if report is None else report.worst()
