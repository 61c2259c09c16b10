"""Detects training that stalls without an error: all steps are skipped, or all gradients are zeros.

It reads the agreed statistics that the host has anyway, so that every rank notices at the same step.
"""

from typing import Protocol

from megascale.config import OptimizerConfig
from megascale.errors import MinScaleError, SkippedStepsError
from megascale.grad_scaler import MegatronGradScaler
from megascale.step.misuse import Statistics, has_only_zeros, was_skipped
from megascale.step.scale_floor import ScaleFloor
from megascale.utils import call_site

FIRST_LOOK = 8
"""Steps skipped in a row after which main params are searched for what is not finite; then at each doubling. By then a
loss scale of 2**16 has fallen to 2**9."""
FIRST_WARNING = 32
"""Steps in a row, skipped or with gradients of zeros, after which there is a warning; then at each doubling."""
FIRST_FLOOR_WARNING = 8
"""Overflows in a row at the smallest loss scale after which there is a warning; then at each doubling."""


class Witness(Protocol):
    """Tells more of what the statistics show. Each method waits for the device and communicates: all ranks call it."""

    def raise_damage(self) -> None:
        """Raise NonFiniteParamError, on every rank alike, for main params that are not finite."""

    def worst_params(self) -> str:
        """Return a clause that names the parameters with most non-finite gradient elements, on every rank alike."""


class StallWatch:
    """Counts skipped steps in a row, overflows at the smallest loss scale, and steps with gradients of zeros.

    Args:
        config: its ``max_consecutive_skips`` and ``max_overflows_at_min_scale``.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._most_skips = config.max_consecutive_skips
        self._most_at_floor = config.max_overflows_at_min_scale
        self._floor = ScaleFloor()
        self.clear()

    def clear(self) -> None:
        """Reset the counts; called when other weights were loaded."""
        self._skips = self._spikes = self._zeros = 0
        self._floor.clear()

    def observe(
        self, agreed: Statistics, *, skipped: bool, scaler: MegatronGradScaler | None, witness: Witness
    ) -> None:
        """Count one step; warn or raise.

        Args:
            agreed: the step's statistics.
            skipped: whether it was skipped, for whatever reason, if the statistics alone do not tell.
            scaler: of the loss, before this step has changed its scale.
            witness: asked rarely.

        Raises:
            SkippedStepsError: for more skips in a row than were allowed.
            MinScaleError: for more overflows in a row at the smallest loss scale than were allowed.
            NonFiniteParamError: for a main param that is not finite, if steps are skipped.
        """
        overflowed = was_skipped(agreed)
        if overflowed or skipped:
            self._observe_skip(overflowed, scaler, witness)
        elif self._skips:
            self._skips = self._spikes = 0
            self._floor.clear()
        self._zeros = self._zeros + 1 if has_only_zeros(agreed) else 0
        if _is_time(self._zeros, FIRST_WARNING):
            call_site.warn(
                f"no gradient, or none but zeros, in {self._zeros} steps in a row: small gradients are lost below the "
                "smallest number of 16 bit (raise the loss scale; clip with config.clip_grad, not by hand, where "
                "gradients are still scaled), or the loss does not depend on the parameters, or backward() is missing",
                RuntimeWarning,
            )

    def _observe_skip(self, overflowed: bool, scaler: MegatronGradScaler | None, witness: Witness) -> None:
        self._skips += 1
        self._spikes += not overflowed
        at_floor = self._floor.observe(overflowed, scaler)
        too_many = _is_above(self._skips, self._most_skips)
        too_low = _is_above(at_floor, self._most_at_floor)
        if _is_time(self._skips, FIRST_LOOK) or too_many or too_low:
            witness.raise_damage()
        lowest = None if scaler is None else scaler.lowest_scale
        if too_low:
            raise MinScaleError(
                f"{at_floor} steps in a row overflowed at the smallest loss scale, {lowest}, "
                f"config.max_overflows_at_min_scale allows {self._most_at_floor}: "
                f"{_WHY_AT_FLOOR}{witness.worst_params()}"
            )
        if too_many:
            raise SkippedStepsError(
                f"{self._skips} steps in a row were skipped, config.max_consecutive_skips allows {self._most_skips}: "
                f"{self._why_skipped()}{witness.worst_params() if self._spikes < self._skips else ''}"
            )
        if _is_time(at_floor, FIRST_FLOOR_WARNING):
            call_site.warn(
                f"{at_floor} steps in a row overflowed at the smallest loss scale, {lowest}: {_WHY_AT_FLOOR}",
                RuntimeWarning,
            )
        if _is_time(self._skips, FIRST_WARNING):
            call_site.warn(
                f"{self._skips} steps in a row were skipped: {self._why_skipped()}",
                RuntimeWarning,
            )

    def _why_skipped(self) -> str:
        if self._spikes == 0:
            return WHY_SKIPPED
        return f"the gradient norm was a spike in {self._spikes} of them; {_WHY_SPIKES}"


WHY_SKIPPED = (
    "the gradients hold inf or NaN, and nothing is learnt; look at the loss and the data, lower the learning rate, and "
    "go back to a checkpoint from before"
)
"""Cause and remedy of steps that overflow without end; also in the errors of :mod:`megascale.amp`."""
_WHY_SPIKES = (
    "look at result.grad_norm, raise config.grad_norm_skip_threshold or config.zclip_z_thresh if it is sound, or else "
    "lower the learning rate, and go back to a checkpoint from before"
)
_WHY_AT_FLOOR = (
    "the gradients hold inf or NaN at any scale that it may take; look at the loss and the data, lower the learning "
    "rate, go back to a checkpoint from before, or train in bf16; if gradients are sound but large, average the loss "
    "instead of summing it, or lower config.min_loss_scale"
)


def _is_above(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit


def _is_time(count: int, first: int) -> bool:
    """Whether ``count`` is ``first``, a power of 2, doubled any number of times."""
    return count >= first and count.bit_count() == 1
