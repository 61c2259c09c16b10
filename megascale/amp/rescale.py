"""Updates the loss scale from `found_inf` on the device: torch's rule, with limits and hysteresis."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.amp.errors import ScalerArgumentError
from megascale.config import HYSTERESIS_RESETS
from megascale.errors import ArgumentError
from megascale.utils import validate

LARGEST_INTERVAL = 2**31 - 1
"""torch counts clean steps in int32."""


@dataclass(frozen=True)
class Limits:
    """Bounds and hysteresis of a scale, beyond torch's factors and interval.

    Attributes:
        min_scale: the scale never falls below it.
        max_scale: the scale never grows above it. None: only fp32 limits it, torch's rule.
        hysteresis: overflows before the scale backs off.
        hysteresis_reset: what replenishes them: "growth" or "clean_step"; see :class:`megascale.DynamicGradScaler`.

    Raises:
        ArgumentError, ArgumentTypeError: for a value out of range, naming it.
    """

    min_scale: float = validate.SMALLEST_SCALE
    max_scale: float | None = None
    hysteresis: int = 1
    hysteresis_reset: str = "growth"

    def __post_init__(self) -> None:
        low = validate.scale("min_scale", self.min_scale)
        if self.max_scale is not None and low > validate.scale("max_scale", self.max_scale):
            raise ArgumentError(f"min_scale <= max_scale must hold, got {low} <= {self.max_scale}")
        validate.integer("hysteresis", self.hysteresis, minimum=1, maximum=LARGEST_INTERVAL)
        validate.one_of("hysteresis_reset", self.hysteresis_reset, HYSTERESIS_RESETS)

    def scale(self, name: str, value: Any) -> float:
        """Return ``value`` as a loss scale within the limits. Raises ArgumentError, naming it ``name``."""
        number = validate.positive(name, value)
        high = torch.finfo(torch.float32).max if self.max_scale is None else self.max_scale
        if not self.min_scale <= number <= high:
            raise ArgumentError(
                f"{name} must be between min_scale={self.min_scale} and "
                f"max_scale={self.max_scale or 'the largest fp32 number'}, got {value!r}"
            )
        return number

    def clamp_(self, scale: Tensor) -> None:
        """Clamp ``scale`` to the limits in place, without a sync."""
        scale.clamp_(self.min_scale, self.max_scale)


def growth_factor(value: Any) -> float:
    """Return ``value`` as a growth factor: above 1."""
    number = validate.real("growth_factor", value)
    if number <= 1:
        raise ScalerArgumentError(f"The growth factor must be > 1.0, got growth_factor={value!r}.")
    return number


def backoff_factor(value: Any) -> float:
    """Return ``value`` as a backoff factor: between 0 and 1, exclusive."""
    number = validate.real("backoff_factor", value)
    if not 0 < number < 1:
        raise ScalerArgumentError(f"The backoff factor must be < 1.0 and above 0, got backoff_factor={value!r}.")
    return number


def growth_interval(value: Any) -> int:
    """Return ``value`` as a number of clean steps."""
    return validate.integer("growth_interval", value, minimum=1, maximum=LARGEST_INTERVAL)


@torch.no_grad()
def rescale_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor | None,
    found_inf: Tensor,
    limits: Limits,
    *,
    growth: float,
    backoff: float,
    interval: int,
) -> None:
    """Update the scale and trackers after one step. Products are torch's: taken in fp64, rounded once.

    Args:
        scale: fp32, 0-d.
        growth_tracker: int32, 0-d: clean steps since the last change. If it is above the interval, as from a state
            dict, the scale grows at the next clean step; torch's never would.
        hysteresis_tracker: int32, 0-d; None where ``limits.hysteresis`` is 1.
        found_inf: fp32, 0-d; above 0: found.
    """
    growth_tracker.clamp_(max=interval - 1)
    before = None if hysteresis_tracker is None else scale.clone()
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth, backoff, interval)
    if hysteresis_tracker is not None and before is not None:
        found = found_inf > 0
        left = (hysteresis_tracker - 1).clamp_(min=0)
        scale.copy_(torch.where(found & (left > 0), before, scale))
        # A growth tracker of 0 after a clean step means that the scale grew.
        replenished = torch.ones_like(found) if limits.hysteresis_reset == "clean_step" else growth_tracker == 0
        clean = torch.where(replenished, limits.hysteresis, hysteresis_tracker)
        hysteresis_tracker.copy_(torch.where(found, left, clean))
    limits.clamp_(scale)
