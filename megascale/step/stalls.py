"""Detects training that stalls without an error: steps skipped, gradients of zeros, or clipped while they are scaled.

It reads the agreed statistics that the host has anyway, so that every rank notices at the same step.
"""

import math
from collections.abc import Callable, Sequence

from megascale.errors import MinScaleError, SkippedStepsError
from megascale.grad_scaler import MegatronGradScaler
from megascale.host_view import HostView, known_values
from megascale.kernels import Statistic
from megascale.step.deferred_errors import non_finite_params
from megascale.step.member import StepMember
from megascale.step.misuse import Statistics, has_only_zeros
from megascale.step.overflows import OverflowRecorder
from megascale.step.result import StepObserver, StepRecord
from megascale.utils import call_site
from megascale.utils.collectives import raise_together
from megascale.utils.transfer import is_capturing

FIRST = 8
"""Steps in a row after which there is a warning of gradients of zeros, of one norm of the scaled gradients, and of
overflows at the smallest loss scale; skipped ones after which main params are searched for what is not finite, as by
then a loss scale of 2**16 has fallen to 2**9. Then at each doubling."""
FIRST_SKIPS = 32
"""Steps skipped in a row after which there is a warning; then at each doubling."""
LARGEST_CLIP = 100.0
"""Norm above which nobody clips."""
SAME_SQUARES = 1e-2
"""By how much, relatively, sums of squares of gradients that were clipped to one norm differ: torch rounds the norm and
the factor of fp16 gradients to fp16, where a factor below 2**-14 is subnormal."""


ROUNDING = 1 + 1e-6
"""The scale is fp32, its minimum is not."""


class ScaleFloor:
    """Counts overflows in a row at the smallest scale. Every rank counts the same, as all have the same scale.

    The scale is on the device. The host looks at it only after an overflow, and never waits: on a CPU it reads the
    scale at once, on an accelerator it has it one step later, when it learns of the next overflow. There the first of
    a row is not counted.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the count anew."""
        self._count = 0
        self._view = HostView()

    def observe(self, overflowed: bool, scaler: MegatronGradScaler | None) -> int:
        """Count one step, before its loss scale changes. Returns the count.

        Args:
            overflowed: whether the host knows of an overflow, in this step or the one before.
            scaler: None, and one whose scale never falls, count nothing.
        """
        lowest = None if scaler is None else scaler.lowest_scale
        if not overflowed or scaler is None or lowest is None:
            self.clear()
            return 0
        live = scaler.live_scale
        scale = known_values(live, self._view, late=live.device.type != "cpu")
        self._count = self._count + 1 if scale is not None and scale[0] <= lowest * ROUNDING else 0
        return self._count


class StallWatch(StepObserver):
    """Counts steps in a row that were skipped, overflowed at the smallest loss scale, had gradients of zeros, or had
    the same norm of the scaled gradients. At a clean step it waits for nothing and sends nothing.

    Args:
        members: of the recipe; the config of the first has ``max_consecutive_skips`` and
            ``max_overflows_at_min_scale``.
        overflows: names the parameters; told of each step before this watch.
        sees_spikes: whether steps may be skipped without an overflow.
    """

    def __init__(self, members: Sequence[StepMember], overflows: OverflowRecorder, *, sees_spikes: bool) -> None:
        self._members = list(members)
        self._overflows = overflows
        self._most_skips = members[0].config.max_consecutive_skips or math.inf
        self._most_at_floor = members[0].config.max_overflows_at_min_scale or math.inf
        self._sees_spikes = sees_spikes
        self._view = HostView()
        self._floor = ScaleFloor()
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self._skips = self._spikes = self._zeros = self._same = 0
        self._squares, self._varies = math.nan, False
        self._floor.clear()

    def on_step(self, agreed: Statistics | None, record: StepRecord, *, overflowed: bool) -> None:
        """Count one step; warn or raise.

        Raises:
            SkippedStepsError: for more skips in a row than were allowed.
            MinScaleError: for more overflows in a row at the smallest loss scale than were allowed.
            NonFiniteParamError: for a main param that is not finite, if steps are skipped.
        """
        skipped, found_inf = overflowed, record.found_inf
        if self._sees_spikes and not is_capturing(found_inf.device):
            # Of the newest step that the host knows of: on a CPU this one, else the one before.
            known = known_values(found_inf.reshape(1), self._view, late=found_inf.device.type != "cpu")
            skipped = skipped or (known is not None and known != [0.0])
        if agreed is None:
            return
        scaler = record.scaler
        if skipped:
            self._observe_skip(overflowed, scaler)
        elif self._skips:
            self._skips = self._spikes = 0
            self._floor.clear()
        self._zeros = self._zeros + 1 if has_only_zeros(agreed) else 0
        if self._zeros and _is_due(self._zeros):
            call_site.warn(
                f"no gradient, or none but zeros, in {self._zeros} steps in a row: small gradients are lost below the "
                "smallest number of 16 bit (raise the loss scale; clip with optimizer.clip_grad, not by hand, where "
                "gradients are still scaled), or the loss does not depend on the parameters (in RL: rewards are equal, "
                "so that all advantages are 0), or backward() is missing",
                RuntimeWarning,
            )
        # Gradients that were clipped before they were unscaled have the limit as their norm, step after step.
        squares = agreed[Statistic.SUM_SQUARES]
        is_limit = 0 < squares <= LARGEST_CLIP**2 and scaler is not None and scaler.needs_scaled_loss
        if is_limit and abs(squares - self._squares) <= SAME_SQUARES * squares:
            self._same += 1
            self._varies = self._varies or squares != self._squares
        else:
            self._same, self._squares, self._varies = int(is_limit), squares, False
        # Gradients that are the same to the bit, as a benchmark's, were not clipped: that rounds each step's otherwise.
        if self._varies and _is_due(self._same):
            norm = math.sqrt(squares)
            call_site.warn(
                f"the norm of the scaled gradients was {norm:.2g} in {self._same} steps in a row, as if they had "
                "been clipped while they were scaled: SGD then stands still, and Adam hides it for a while. Remove "
                f"torch.nn.utils.clip_grad_norm_(), and set optimizer.clip_grad = {norm:.2g} once: step() clips the "
                "unscaled gradients, over all ranks",
                RuntimeWarning,
            )

    def _observe_skip(self, overflowed: bool, scaler: MegatronGradScaler | None) -> None:
        self._skips += 1
        self._spikes += not overflowed
        at_floor = self._floor.observe(overflowed, scaler)
        is_too_much = self._skips > self._most_skips or at_floor > self._most_at_floor
        # First: weights that are not finite are a cause, and the other errors would tell only what follows from it.
        if _is_due(self._skips) or is_too_much:
            params = (param for member in self._members for param in member.main_params)
            raise_together(non_finite_params(params), self._overflows.group)
        lowest = None if scaler is None else scaler.lowest_scale
        worst = self._overflows.worst if self._spikes < self._skips else str
        spikes = f"the gradient norm was a spike in {self._spikes} of them; {_WHY_SPIKES}"
        why = spikes if self._spikes else WHY_SKIPPED
        raise_excess(self._skips, self._most_skips, at_floor, self._most_at_floor, lowest, why, worst)
        if _is_due(at_floor):
            call_site.warn(
                f"{at_floor} steps in a row overflowed at the smallest loss scale, {lowest}: {_WHY_AT_FLOOR}",
                RuntimeWarning,
            )
        if _is_due(self._skips, FIRST_SKIPS):
            call_site.warn(f"{self._skips} steps in a row were skipped: {why}", RuntimeWarning)


WHY_SKIPPED = (
    "the gradients hold inf or NaN, and nothing is learnt; optimizer.last_overflow() (of a GradScaler: "
    "scaler.last_overflow()) names the parameters, megascale.debug.watch(model) the module in which it began; look at "
    "the loss and the data, lower the learning rate, and go back to a checkpoint from before"
)
"""Cause and remedy of steps that overflow without end; also in the errors of :mod:`megascale.amp`."""
_WHY_SPIKES = (
    "look at result.grad_norm, raise config.grad_norm_skip_threshold if it is sound, or else lower the learning rate, "
    "and go back to a checkpoint from before"
)
_WHY_AT_FLOOR = (
    "the gradients hold inf or NaN at any scale that it may take; optimizer.last_overflow() (of a GradScaler: "
    "scaler.last_overflow()) names the parameters, "
    "megascale.debug.watch(model) the module in which it began; look at the loss and the data, lower the learning "
    "rate, go back to a checkpoint from before, or train in bf16; if gradients are sound but large, average the loss "
    "instead of summing it, or lower min_scale of the grad scaler (config.min_loss_scale)"
)


def raise_excess(
    skips: int,
    most_skips: float,
    at_floor: int,
    most_at_floor: float,
    lowest: float | None,
    why_skipped: str,
    worst: Callable[[], str],
) -> None:
    """Raise MinScaleError or SkippedStepsError where more steps in a row were skipped than the limits allow.

    ``at_floor``: of ``skips``, those in a row at ``lowest``, the smallest scale. ``worst``: returns a clause that names
    parameters; all ranks that skip together call it together.
    """
    if at_floor > most_at_floor:
        raise MinScaleError(
            f"{at_floor} steps in a row overflowed at the smallest loss scale, {lowest}, max_overflows_at_min_scale "
            f"allows {most_at_floor}: {_WHY_AT_FLOOR}{worst()}"
        )
    if skips > most_skips:
        raise SkippedStepsError(
            f"{skips} steps in a row were skipped, max_consecutive_skips allows {most_skips}: {why_skipped}{worst()}"
        )


def _is_due(count: int, first: int = FIRST) -> bool:
    """Whether ``count`` is ``first``, a power of 2, doubled any number of times."""
    return count >= first and count.bit_count() == 1
