"""Parses the scaler's state dict: torch's five entries and our ``hysteresis_tracker``."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megascale.amp.errors import EmptyScalerStateError
from megascale.amp.limits import LARGEST_INTERVAL, Limits, backoff_factor, growth_factor, growth_interval
from megascale.errors import ArgumentError, StateDictError
from megascale.utils import validate

HYSTERESIS = "hysteresis_tracker"


def parse(state_dict: Any, limits: Limits) -> dict[str, Any]:
    """Return the entries as Python numbers. A missing ``hysteresis_tracker`` becomes the full hysteresis.

    A tracker above the scaler's hysteresis is cut to it. Entries that are not ours are ignored.

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
