"""The budget of skipped steps in a row: a run whose gradients overflow without end stops with an error."""

from collections.abc import Callable

from torch import Tensor

from megascale.errors import SkippedStepsError
from megascale.host_view import HostView
from megascale.step.overflow_report import OverflowReport
from megascale.utils import validate


class SkipBudget:
    """Counts skipped steps in a row, and raises where there are more than are allowed.

    Args:
        most: skips in a row that are allowed.

    Raises:
        ArgumentError, ArgumentTypeError: for ``most``, naming it.
    """

    def __init__(self, most: int) -> None:
        self.most = validate.integer("max_consecutive_skips", most, minimum=1)
        self._count = 0
        self._view = HostView()

    def observe(self, found_inf: Tensor, last_overflow: Callable[[], OverflowReport | None]) -> None:
        """Count one step.

        Args:
            found_inf: fp32, 0-d. On an accelerator the host learns of it at the next step.
            last_overflow: returns the report of all ranks, which call it together.

        Raises:
            SkippedStepsError: on every rank that has this `found_inf`, with the worst parameters.
        """
        row = found_inf.reshape(1)
        if row.device.type == "cpu":
            found = row.tolist() != [0.0]
        else:
            late = self._view.push_vector(["found_inf"], row)
            found = late is not None and late["found_inf"] != 0
        self._count = self._count + 1 if found else 0
        if self._count > self.most:
            report = last_overflow()
            raise SkippedStepsError(
                f"{self._count} steps in a row were skipped, max_consecutive_skips of the GradScaler allows "
                f"{self.most}: the gradients hold inf or NaN, and nothing is learnt; look at the loss and the data, "
                f"lower the learning rate, and go back to a checkpoint from before{report.worst() if report else ''}"
            )
