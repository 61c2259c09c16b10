"""StepCounter: steps are counted on the host, skipped ones on the device, without a host sync."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError, StateDictError
from megascale.utils import validate

COUNT_KEYS = ("landed", "skipped")


class StepCounter:
    """Counts the steps of one optimizer, and continues from saved counts.

    Attributes:
        steps: taken since construction, landed or not.
        skips: how many of ``steps`` were skipped: int64, 0-d, on the device. Updated in place: captured graphs hold
            this address.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self.skips = torch.zeros((), dtype=torch.int64, device=device)
        self._taken_before = 0
        self._landed_before: int | Tensor = 0
        self._skipped_before: int | Tensor = 0

    def count(self, found_inf: Tensor, *, on_host: bool) -> None:
        """Count a step, skipped where ``found_inf``, fp32, 0-d, is 1. ``on_host``: count it among ``steps``, too."""
        self.skips.add_(found_inf.to(torch.int64))
        self.steps += on_host

    @property
    def taken(self) -> int:
        """All steps, landed or not, those before a load too."""
        return self.steps + self._taken_before

    @property
    def landed(self) -> Tensor:
        """All steps that landed, those before a load too: int64, 0-d, on the device."""
        return self.steps - self.skips + self._landed_before

    @property
    def skipped(self) -> Tensor:
        """All steps that were skipped, those before a load too: int64, 0-d, on the device."""
        return self.skips + self._skipped_before

    def state_dict(self) -> dict[str, int]:
        """Return both counts. Waits for the device."""
        return {"landed": int(self.landed), "skipped": int(self.skipped)}

    def load_state_dict(self, counts: Mapping[str, int]) -> None:
        """Continue from counts that :func:`parse_counts` returned."""
        self._taken_before = counts["landed"] + counts["skipped"] - self.steps
        self._landed_before = counts["landed"] - (self.steps - self.skips)
        self._skipped_before = counts["skipped"] - self.skips


def parse_counts(given: Any) -> dict[str, int]:
    """Return saved counts, checked. Raises StateDictError."""
    if not isinstance(given, Mapping) or not set(COUNT_KEYS) <= set(given):
        raise StateDictError(
            f"state dict's 'step_counts' must hold {' and '.join(map(repr, COUNT_KEYS))}, got {given!r}"
        )
    try:
        return {
            key: validate.integer(f"state dict's step_counts[{key!r}]", given[key], minimum=0) for key in COUNT_KEYS
        }
    except ArgumentError as error:
        raise StateDictError(str(error)) from None
