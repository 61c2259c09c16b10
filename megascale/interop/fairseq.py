"""Reads fairseq's loss scale: ``last_optimizer_state`` of a checkpoint, written by ``FP16Optimizer.state_dict``."""

from collections.abc import Mapping
from typing import Any

from megascale.errors import InteropError
from megascale.interop.named_state import FoundState, Names
from megascale.interop.records import attributes_of
from megascale.interop.scaler_state import (
    NO_CEILING,
    NO_FLOOR,
    FoundScaler,
    ScalerConfig,
    as_int,
    checked_scale,
    dynamic,
)
from megascale.interop.source import Source
from megascale.utils.validate import SMALLEST_SCALE

SYSTEM = "fairseq"
DEFAULT_UPDATES = 2**14


def recognises(source: Source) -> bool:
    """Whether ``source`` is a fairseq checkpoint, or its optimizer's state."""
    return "optimizer_history" in source.top_keys() or _loss_scale(source) is not None


def find_scaler(source: Source, index: int | None = None) -> FoundScaler | None:
    """Return the scaler as fairseq itself resumes it: the scale, with reset counters; None without fp16.

    fairseq's rule: an overflow divides the scale by 2 (not below threshold_loss_scale) if the share of overflows since
    the scale last changed has reached fp16_scale_tolerance; every ``scale_window`` clean steps since the last overflow
    double it. With a tolerance of 0, its default, that is our rule with hysteresis 1.
    """
    scale = _loss_scale(source)
    if scale is None:
        return None
    options = _options(source)
    tolerance, threshold = options.get("fp16_scale_tolerance", 0.0), options.get("threshold_loss_scale")
    unfaithful = []
    if tolerance:
        unfaithful.append(
            f"fp16_scale_tolerance is {tolerance}: the scale waits for a share of overflows, which megascale's scaler "
            "cannot: it counts them"
        )
    notes = [
        "fairseq does not save its counters, and begins them anew when it resumes: so do we",
        "fairseq stops training where the scale falls to min_loss_scale "
        f"({options.get('min_loss_scale', 'not recorded')}); megascale continues",
        NO_CEILING.format(system="fairseq"),
    ]
    if threshold is None:
        notes.append(NO_FLOOR.format(system="fairseq"))
    if not options:
        notes.append("no configuration is in it: a tolerance of 0 and no threshold, fairseq's defaults, are taken")
    floor = SMALLEST_SCALE if threshold is None else checked_scale(SYSTEM, threshold)
    config = ScalerConfig(growth_interval=_window(options), min_scale=floor)
    return dynamic(
        SYSTEM, scale, 0, 1, config, mapped=("loss_scale", "factor 2"), not_mapped=notes, unfaithful=unfaithful
    )


def find_state(source: Source, names: Names | None = None) -> FoundState | None:
    """Raise InteropError, as no parameters' names are saved. Returns None if no optimizer's state was saved."""
    if source.entry("last_optimizer_state") is None and "param_groups" not in source.top_keys():
        return None
    raise InteropError(
        f"{source.where} is fairseq's: it saves no main params (it makes them anew from the 16-bit weights), and its "
        "moments lie flat, without the parameters' names; take the scaler alone"
    )


def _loss_scale(source: Source) -> Any:
    state = source.entry("last_optimizer_state")
    if isinstance(state, Mapping):
        return state.get("loss_scale")
    return source.entry("loss_scale") if "param_groups" in source.top_keys() else None


def _options(source: Source) -> dict[str, Any]:
    """Return the needed options, from "cfg" (by section) or "args" (flat, before hydra)."""
    if (args := source.entry("args")) is not None:
        return attributes_of(args)
    options: dict[str, Any] = {}
    for section in attributes_of(source.entry("cfg")).values() if source.entry("cfg") is not None else ():
        options |= attributes_of(section)
    return options


def _window(options: Mapping[str, Any]) -> int | None:
    """Return the window: given, or fairseq's default of 2**14 samples' worth of updates; None if not recorded."""
    if options.get("fp16_scale_window") is not None:
        return as_int(SYSTEM, "fp16_scale_window", options["fp16_scale_window"], minimum=1)
    world, every = options.get("distributed_world_size"), options.get("update_freq")
    if not isinstance(world, int) or not isinstance(every, (list, tuple)) or len(every) != 1:
        return None
    ranks = int(world / (options.get("model_parallel_size") or 1))
    return int(DEFAULT_UPDATES / ranks / every[0]) or None
