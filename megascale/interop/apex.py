"""Reads apex.amp's scalers: ``amp.state_dict()``, alone or under "amp" in a checkpoint."""

from collections.abc import Mapping
from typing import Any

from megascale.interop.scaler_state import NO_FLOOR, FoundScaler, ScalerConfig, as_int, constant, dynamic
from megascale.interop.source import Source
from megascale.interop.torch_amp import chosen

SYSTEM = "apex.amp"
# apex.amp.scaler.LossScaler's defaults; only the two bounds are arguments of amp.initialize.
WINDOW, MAX_SCALE = 2000, 2.0**24
ENTRY_KEYS = {"loss_scale", "unskipped"}


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(
            str(key).startswith("loss_scaler") and isinstance(entry, Mapping) and set(entry) == ENTRY_KEYS
            for key, entry in value.items()
        )
    )


def _state_in(content: Any) -> Any:
    if _is_state(content):
        return content
    values = content.values() if isinstance(content, Mapping) else ()
    return next((value for value in values if _is_state(value)), None)


def recognises(source: Source) -> bool:
    """Whether ``source`` is an ``amp.state_dict()``, or a dict with one in it."""
    return _state_in(source.content) is not None


def find_scaler(source: Source, index: int | None = None) -> FoundScaler | None:
    """Return the state of the scaler of loss ``index``; for None, raises InteropError if several differ."""
    states = _state_in(source.content)
    return None if states is None else parse(states, source.where, index)


def parse(states: Mapping[str, Any], where: str, index: int | None = None) -> FoundScaler:
    """Return the scaler in an ``amp.state_dict()``.

    apex's rule: an overflow halves the scale (not below min_loss_scale, if that is set); the 2000th clean step since
    doubles it (not above max_loss_scale) and resets the count. With a constant scale the count goes on.
    """
    key, entry = chosen({str(key): value for key, value in states.items()}, index, where, "loss scalers")
    unskipped = as_int(SYSTEM, "unskipped", entry["unskipped"])
    if unskipped >= WINDOW:
        reason = (
            f"{unskipped} clean steps in a row: a dynamic scale of apex counts to {WINDOW} at most, so it is constant"
        )
        return constant(SYSTEM, entry["loss_scale"], mapped=(f"{key}: loss_scale", reason))
    return dynamic(
        SYSTEM,
        entry["loss_scale"],
        unskipped,
        1,
        ScalerConfig(growth_interval=WINDOW, max_scale=MAX_SCALE),
        mapped=(f"{key}: loss_scale, unskipped (growth tracker)", f"apex's own: factor 2, window {WINDOW}"),
        not_mapped=(
            "apex does not record whether the scale is dynamic: it is taken to be; for a constant one use "
            "ConstantGradScaler",
            "apex does not record min_loss_scale (default: none) and max_loss_scale (2**24): pass min_scale and "
            "max_scale to build_grad_scaler if they were set",
            NO_FLOOR.format(system="apex"),
        ),
    )
