"""Reads the state of torch.amp.GradScaler, and of FSDP's ShardedGradScaler, which has the same keys."""

from collections.abc import Mapping
from typing import Any

from megascale.errors import InteropError
from megascale.interop.files import read_file
from megascale.interop.scaler_state import NO_CEILING, NO_FLOOR, FoundScaler, ScalerConfig, as_int, constant, dynamic
from megascale.interop.source import Source

SYSTEM = "torch.amp"
KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def is_state(value: Any) -> bool:
    """Whether ``value`` looks like the state of an enabled GradScaler."""
    return isinstance(value, Mapping) and {"scale", "_growth_tracker"} <= value.keys()


def states_in(content: Any) -> dict[str, Any]:
    """Return the scaler states at the top of a training checkpoint, by their keys."""
    return (
        {str(key): value for key, value in content.items() if is_state(value)} if isinstance(content, Mapping) else {}
    )


def recognises(source: Source) -> bool:
    """Whether ``source`` is a GradScaler's state, or a dict with one in it."""
    return is_state(source.content) or bool(states_in(source.content))


def find_scaler(source: Source) -> FoundScaler | None:
    """Return the scaler's state, or None.

    Raises:
        InteropError: there are several that differ, or it cannot be read.
    """
    if is_state(source.content):
        return parse(source.content)
    states = states_in(source.content)
    if not states:
        return None
    key, state = chosen(states, source.where)
    return parse(state, mapped=(f"grad scaler: key {key!r}",))


def find_in_file(source: Source, name: str, system: str) -> FoundScaler | None:
    """Return the scaler in ``source``'s file ``name``, which ``system`` wrote; None if there is no such file.

    Raises:
        InteropError: it is no scaler's state dict.
    """
    for path in source.files(name):
        state = read_file(path)
        if not isinstance(state, Mapping):
            raise InteropError(f"{path} is no state dict")
        return parse(state, system, (name,))
    return None


def parse(state: Mapping[str, Any], system: str = SYSTEM, mapped: tuple[str, ...] = ()) -> FoundScaler:
    """Return the scaler in a GradScaler's state dict; ``{}`` is a disabled one."""
    if not state:
        return constant(system, 1.0, mapped=mapped, not_mapped=("nothing is in it: the scaler was disabled",))
    if strange := sorted(map(str, set(state) - KEYS)):
        raise InteropError(f"{system}'s scaler state has {', '.join(strange)}, which is not torch's; who wrote it?")
    if missing := sorted(KEYS - set(state)):
        raise InteropError(f"{system}'s scaler state lacks {', '.join(missing)}; it is not whole")
    interval = as_int(system, "growth_interval", state["growth_interval"], minimum=1)
    growth, backoff = state["growth_factor"], state["backoff_factor"]
    if not (isinstance(growth, (int, float)) and isinstance(backoff, (int, float)) and 0 < backoff < 1 < growth):
        raise InteropError(
            f"{system}'s growth_factor is {growth!r} and its backoff_factor {backoff!r}; the one must be above 1, the "
            "other between 0 and 1"
        )
    config = ScalerConfig(growth_factor=float(growth), backoff_factor=float(backoff), growth_interval=interval)
    return dynamic(
        system,
        state["scale"],
        state["_growth_tracker"],
        1,
        config,
        mapped=(
            *mapped,
            "scale, growth tracker, growth and backoff factor, growth interval; torch has no hysteresis: 1",
        ),
        not_mapped=(NO_FLOOR.format(system="torch"), NO_CEILING.format(system="torch")),
    )


def chosen(found: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """Return the first scaler and its key. Raises InteropError if another one differs from it."""
    keys = list(found)
    if any(found[key] != found[keys[0]] for key in keys[1:]):
        raise InteropError(
            f"{where} holds {len(keys)} grad scalers that differ, {', '.join(keys)}; save one of them alone, or pass "
            "the state dict of one to load_scaler_state()"
        )
    return keys[0], found[keys[0]]
