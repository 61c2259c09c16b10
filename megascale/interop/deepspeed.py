"""Reads DeepSpeed's loss scalers: pickled objects in ZeRO's files, numbers in those of FP16_Optimizer.

Megatron's scaler before Megatron-Core, the origin of DeepSpeed's, was pickled in the same way.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.errors import InteropError
from megascale.interop.files import read_file
from megascale.interop.records import attributes_of, kind_of
from megascale.interop.scaler_state import (
    NO_CEILING,
    FoundScaler,
    ScalerConfig,
    as_int,
    checked_scale,
    constant,
    dynamic,
)
from megascale.interop.source import Source
from megascale.utils.validate import LARGEST_SCALE

SYSTEM = "DeepSpeed"
MODEL_FILES = ("mp_rank_*_model_states.pt", "zero_pp_rank_*_model_states.pt")
OPTIMIZER_FILES = ("*zero_pp_rank_*_optim_states.pt",)


def recognises(source: Source) -> bool:
    """Whether ``source`` is a DeepSpeed checkpoint folder, one of its files, its optimizer's state, or its scaler."""
    if source.folder is not None:
        return bool(checkpoint(source).files(*MODEL_FILES, *OPTIMIZER_FILES))
    return _optimizer_state(source.content) is not None or _is_scaler(source.content)


def checkpoint(source: Source) -> Source:
    """Return the folder of one checkpoint: ``source``, or the folder that its file ``latest`` names."""
    for latest in filter(Path.is_file, source.files("latest")):
        tag = latest.read_text().strip()
        folder = latest.parent / tag
        if not tag or Path(tag).name != tag or not folder.is_dir():
            raise InteropError(f"{latest} names {tag!r}, which is no folder beside it")
        return Source(str(folder), folder=folder)
    return source


def find_scaler(source: Source) -> FoundScaler | None:
    """Return the scaler's state, or None. All ranks' files have the same one: the first file is read.

    Raises:
        InteropError: it cannot be read.
    """
    if source.folder is None:
        found = source.content if _is_scaler(source.content) else _optimizer_state(source.content)
        return parse(found, attributes_of(source.entry("ds_config")))
    folder = checkpoint(source)
    for path in (folder.files(*OPTIMIZER_FILES) or folder.files(*MODEL_FILES))[:1]:
        content = read_file(path)
        state = _optimizer_state(content)
        if state is not None:
            return parse(state, attributes_of(content.get("ds_config")))
    return None


def parse(found: Any, ds_config: Mapping[str, Any]) -> FoundScaler:
    """Return the scaler in a scaler object or an optimizer's state. ``ds_config``: the engine's, if known."""
    scaler = found if _is_scaler(found) else found.get("loss_scaler")
    attributes = found if scaler is None else attributes_of(scaler)
    if scaler is not None and "scale_window" in attributes:
        return _dynamic_object(scaler, attributes)
    if scaler is None and "cur_scale" not in found:
        return constant(SYSTEM, 1.0, not_mapped=("it trained in bf16 or fp32 and scaled no loss",))
    if scaler is not None or not found.get("dynamic_loss_scale"):
        return constant(SYSTEM, attributes["cur_scale"], mapped=("cur_scale: a static loss scale",))
    floor = attributes_of(ds_config.get("fp16")).get("min_loss_scale", 1)
    return _dynamic(
        found | {"min_scale": floor},
        ScalerConfig(late_first_growth=True),
        hysteresis_tracker=1,
        mapped=(
            "its FP16_Optimizer has no hysteresis: 1",
            f"min_loss_scale {floor}, of ds_config, or else its default",
        ),
    )


def _is_scaler(value: Any) -> bool:
    return not isinstance(value, Mapping) and "cur_scale" in attributes_of(value)


def _optimizer_state(content: Any) -> Mapping[str, Any] | None:
    """Return the state of DeepSpeed's optimizer in the content of a file or of the optimizer."""
    if not isinstance(content, Mapping):
        return None
    for state in (content, content.get("optimizer_state_dict"), content.get("optimizer")):
        if isinstance(state, Mapping) and (
            "fp32_groups_flat" in state or "fp32_groups" in state or _is_scaler(state.get("loss_scaler"))
        ):
            return state
    return None


def _dynamic_object(scaler: Any, attributes: Mapping[str, Any]) -> FoundScaler:
    """Map a DynamicLossScaler of DeepSpeed, or of Megatron before Megatron-Core."""
    kind = kind_of(scaler)
    ours = kind.startswith("deepspeed.")
    if not ours and not kind.startswith(("megatron.", "fp16.")):
        raise InteropError(f"the pickled scaler is a {kind}, whose rule is not known")
    defaults = {"min_scale": 1, "delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False}
    values = defaults | dict(attributes)
    config = ScalerConfig(
        hysteresis=as_int(SYSTEM, "delayed_shift", values["delayed_shift"], minimum=1),
        hysteresis_reset="clean_step" if values["consecutive_hysteresis"] else "growth",
        late_first_growth=ours,
    )
    notes = []
    if ours and values.get("raise_error_at_min_scale", True):
        notes.append("DeepSpeed raises an error at an overflow at min_scale; megascale stays there and continues")
    return _dynamic(
        values,
        config,
        hysteresis_tracker=as_int(SYSTEM, "cur_hysteresis", values["cur_hysteresis"], minimum=1),
        mapped=("delayed_shift (hysteresis), cur_hysteresis, consecutive_hysteresis",),
        not_mapped=tuple(notes),
        system=SYSTEM if ours else "Megatron before Megatron-Core",
    )


def _dynamic(
    values: Mapping[str, Any],
    config: ScalerConfig,
    *,
    hysteresis_tracker: int,
    mapped: tuple[str, ...],
    not_mapped: tuple[str, ...] = (),
    system: str = SYSTEM,
) -> FoundScaler:
    """Return the scaler, with DeepSpeed's iteration counts mapped to megascale's growth tracker."""
    if missing := [key for key in ("cur_iter", "last_overflow_iter", "scale_window") if key not in values]:
        raise InteropError(f"{system}'s loss scaler lacks {', '.join(missing)}")
    window = as_int(system, "scale_window", values["scale_window"], minimum=1)
    iteration = as_int(system, "cur_iter", values["cur_iter"])
    overflow = as_int(system, "last_overflow_iter", values["last_overflow_iter"], minimum=-1)
    factor = float(values.get("scale_factor", 2.0))
    if overflow >= iteration or not factor > 1:
        raise InteropError(
            f"{system}'s loss scaler is damaged: last_overflow_iter {overflow} must be below cur_iter {iteration}, and "
            f"scale_factor {factor} above 1"
        )
    clean = iteration - overflow - 1
    late = config.late_first_growth
    rule = replace(
        config,
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=window,
        min_scale=checked_scale(f"{system}'s min_scale:", values["min_scale"]),
        max_scale=LARGEST_SCALE,
    )
    notes, tracker = [NO_CEILING.format(system=system)], clean % window
    if late:
        # DeepSpeedGradScaler's tracker is 1 after a growth, and 0 only after an overflow.
        tracker = (clean - 1) % window + 1 if clean else 0
        notes.append(
            f"DeepSpeed's first growth after an overflow takes {window + 1} clean steps, every further one {window}: "
            "build_grad_scaler() returns a DeepSpeedGradScaler, which does so; a DynamicGradScaler with a "
            f"growth_interval of {window} grows a step early"
        )
    return dynamic(
        system,
        values["cur_scale"],
        tracker,
        hysteresis_tracker,
        rule,
        mapped=("cur_scale, scale_factor, scale_window, min_scale", "cur_iter - last_overflow_iter", *mapped),
        not_mapped=(*notes, *not_mapped),
    )
