"""Limits of a GradScaler's loss scale, its factors and interval, and its state dict, checked."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.amp.errors import EmptyScalerStateError, ScalerArgumentError
from megascale.config import HYSTERESIS_RESETS
from megascale.errors import ArgumentError, StateDictError
from megascale.kernels import ScaleRule
from megascale.utils import validate

LARGEST_INTERVAL = 2**31 - 1
"""torch counts clean steps in int32."""
HYSTERESIS = "hysteresis_tracker"
"""Our entry of a state dict beside torch's five."""


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

    def rule(self, growth_factor: float, backoff_factor: float, growth_interval: int) -> ScaleRule:
        """Return the rule by which the scale follows overflows: torch's products, within the limits."""
        return ScaleRule(
            min_scale=self.min_scale,
            max_scale=math.inf if self.max_scale is None else self.max_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=self.hysteresis,
            each_clean_step=self.hysteresis_reset == "clean_step",
            fp64_products=True,
        )


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


def parse_state(state_dict: Any, limits: Limits) -> dict[str, Any]:
    """Return the entries of a scaler's state dict, torch's five and our ``hysteresis_tracker``, as Python numbers.

    A missing ``hysteresis_tracker`` becomes the full hysteresis; one above the scaler's hysteresis is cut to it.
    Entries that are not ours are ignored.

    Raises:
        StateDictError: naming the entry and its value. :class:`EmptyScalerStateError` where there is none.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(f"grad scaler state must be a dict, got {type(state_dict).__name__}")
    if not state_dict:
        raise EmptyScalerStateError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    checks: dict[str, Callable[[Any], float]] = {
        "scale": lambda value: limits.scale("scale", value),
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
        "_growth_tracker": lambda value: _tracker("_growth_tracker", value),
    }
    state: dict[str, Any] = {key: _checked(state_dict, key, check) for key, check in checks.items()}
    left = limits.hysteresis
    if HYSTERESIS in state_dict:
        left = min(left, int(_checked(state_dict, HYSTERESIS, lambda value: _tracker(HYSTERESIS, value))))
    return state | {HYSTERESIS: left}


def _tracker(name: str, value: Any) -> int:
    return validate.integer(name, value, minimum=0, maximum=LARGEST_INTERVAL)


def _checked(state_dict: Mapping[str, Any], key: str, check: Callable[[Any], float]) -> float:
    if key not in state_dict:
        raise StateDictError(f"grad scaler state lacks '{key}'; it has {sorted(map(str, state_dict))}")
    value = state_dict[key]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return check(value)
    except ArgumentError as error:
        raise StateDictError(f"grad scaler state: {error}") from None
