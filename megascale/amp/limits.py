"""Limits of a GradScaler's loss scale, its factors and interval, and its state dict, checked."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from megascale.amp.errors import EmptyScalerStateError, ScalerArgumentError
from megascale.config import HYSTERESIS_RESETS
from megascale.errors import ArgumentError
from megascale.grad_scaler import check_mapping, entry
from megascale.kernels import ScaleRule
from megascale.utils import validate

LARGEST_COUNT = 2**31 - 1
"""torch counts clean steps in int32."""
HYSTERESIS = "hysteresis_tracker"
"""Our entry of a state dict beside torch's five."""

interval = partial(validate.integer, minimum=1, maximum=LARGEST_COUNT)


def rule_of(
    min_scale: Any,
    max_scale: Any,
    growth_factor: Any,
    backoff_factor: Any,
    growth_interval: Any,
    hysteresis: Any,
    hysteresis_reset: Any,
) -> ScaleRule:
    """Return the rule by which a scale follows overflows: torch's products, within limits. Arguments: GradScaler's.

    Raises ArgumentError or ArgumentTypeError for a value out of range, naming it.
    """
    low = validate.scale("min_scale", min_scale)
    if max_scale is not None and low > validate.scale("max_scale", max_scale):
        raise ArgumentError(f"min_scale <= max_scale must hold, got {low} <= {max_scale}")
    return ScaleRule(
        min_scale=low,
        max_scale=math.inf if max_scale is None else max_scale,
        growth_factor=growth("growth_factor", growth_factor),
        backoff_factor=backoff("backoff_factor", backoff_factor),
        growth_interval=interval("growth_interval", growth_interval),
        hysteresis=interval("hysteresis", hysteresis),
        each_clean_step=validate.one_of("hysteresis_reset", hysteresis_reset, HYSTERESIS_RESETS) == "clean_step",
        fp64_products=True,
    )


def scale_within(rule: ScaleRule, name: str, value: Any) -> float:
    """Return ``value`` as a loss scale within the limits of ``rule``. Raises ArgumentError, naming it ``name``."""
    number = validate.positive(name, value)
    if not rule.min_scale <= number <= min(rule.max_scale, torch.finfo(torch.float32).max):
        highest = "the largest fp32 number" if rule.max_scale == math.inf else rule.max_scale
        raise ArgumentError(f"{name} must be between min_scale={rule.min_scale} and max_scale={highest}, got {value!r}")
    return number


def growth(name: str, value: Any) -> float:
    """Return ``value`` as a growth factor: above 1."""
    number = validate.real(name, value)
    if number <= 1:
        raise ScalerArgumentError(f"The growth factor must be > 1.0, got {name}={value!r}.")
    return number


def backoff(name: str, value: Any) -> float:
    """Return ``value`` as a backoff factor: between 0 and 1, exclusive."""
    number = validate.real(name, value)
    if not 0 < number < 1:
        raise ScalerArgumentError(f"The backoff factor must be < 1.0 and above 0, got {name}={value!r}.")
    return number


def parse_state(state_dict: Any, rule: ScaleRule) -> dict[str, Any]:
    """Return the entries of a scaler's state dict, torch's five and our ``hysteresis_tracker``, as Python numbers.

    A missing ``hysteresis_tracker`` becomes the full hysteresis; one above the scaler's hysteresis is cut to it.
    Entries that are not ours are ignored.

    Raises:
        StateDictError: naming the entry and its value. :class:`EmptyScalerStateError` where there is none.
    """
    check_mapping(state_dict)
    if not state_dict:
        raise EmptyScalerStateError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    given: Mapping[str, Any] = {HYSTERESIS: rule.hysteresis} | dict(state_dict)
    count = partial(validate.integer, minimum=0, maximum=LARGEST_COUNT)
    checks: dict[str, Callable[[str, Any], float]] = {
        "scale": partial(scale_within, rule),
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "_growth_tracker": count,
    }
    state: dict[str, Any] = {key: entry(given, key, check) for key, check in checks.items()}
    return state | {HYSTERESIS: min(rule.hysteresis, entry(given, HYSTERESIS, count))}
