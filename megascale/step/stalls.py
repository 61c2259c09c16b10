"""Detects training that stalls without an error: all steps are skipped, or all gradients are zeros.

It reads the agreed statistics that the host has anyway, so that every rank notices at the same step.
"""

import warnings
from collections.abc import Callable

from megascale.errors import SkippedStepsError
from megascale.step.misuse import Statistics, has_only_zeros, was_skipped

FIRST_LOOK = 8
"""Steps skipped in a row after which main params are searched for what is not finite; then at each doubling. By then a
loss scale of 2**16 has fallen to 2**9."""
FIRST_WARNING = 32
"""Steps in a row, skipped or with gradients of zeros, after which there is a warning; then at each doubling."""


class StallWatch:
    """Counts skipped steps in a row, and steps in a row with gradients of zeros.

    Args:
        max_consecutive_skips: more skipped steps in a row than this raise; None: no limit.
    """

    def __init__(self, max_consecutive_skips: int | None) -> None:
        self._max_consecutive_skips = max_consecutive_skips
        self._skips = 0
        self._zeros = 0

    def clear(self) -> None:
        """Reset the counts; called when other weights were loaded."""
        self._skips = self._zeros = 0

    def observe(self, agreed: Statistics, raise_damage: Callable[[], None]) -> None:
        """Count one step; warn or raise.

        Args:
            agreed: the step's statistics.
            raise_damage: raises NonFiniteParamError, on every rank alike, for main params that are not finite. Costs a
                host sync, so it is called rarely.

        Raises:
            SkippedStepsError: for more skips in a row than were allowed.
            NonFiniteParamError: for a main param that is not finite, if steps are skipped.
        """
        self._skips = self._skips + 1 if was_skipped(agreed) else 0
        self._zeros = self._zeros + 1 if has_only_zeros(agreed) else 0
        if _is_time(self._skips, FIRST_LOOK) or self._has_skipped_too_many():
            raise_damage()
        if self._has_skipped_too_many():
            raise SkippedStepsError(
                f"{self._skips} steps in a row were skipped, config.max_consecutive_skips allows "
                f"{self._max_consecutive_skips}: {_WHY_SKIPPED}"
            )
        if _is_time(self._skips, FIRST_WARNING):
            warnings.warn(f"{self._skips} steps in a row were skipped: {_WHY_SKIPPED}", RuntimeWarning, stacklevel=2)
        if _is_time(self._zeros, FIRST_WARNING):
            warnings.warn(
                f"no gradient, or none but zeros, in {self._zeros} steps in a row: small gradients are lost below the "
                "smallest number of 16 bit (raise the loss scale; clip with config.clip_grad, not by hand, where "
                "gradients are still scaled), or the loss does not depend on the parameters, or backward() is missing",
                RuntimeWarning,
                stacklevel=2,
            )

    def _has_skipped_too_many(self) -> bool:
        return self._max_consecutive_skips is not None and self._skips > self._max_consecutive_skips


_WHY_SKIPPED = (
    "the gradients hold inf or NaN, and nothing is learnt; look at the loss and the data, lower the learning rate, and "
    "go back to a checkpoint from before"
)


def _is_time(count: int, first: int) -> bool:
    """Whether ``count`` is ``first`` doubled any number of times."""
    return count >= first and count % first == 0 and (count // first).bit_count() == 1
