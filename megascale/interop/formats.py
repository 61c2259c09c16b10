"""The supported formats, and detection of a source's format."""

from collections.abc import Callable
from dataclasses import dataclass

from megascale.checkpoint.directory import MANIFEST_NAME
from megascale.errors import InteropError
from megascale.interop import (
    accelerate,
    deepspeed,
    deepspeed_groups,
    lightning,
    megatron,
    torch_amp,
    torch_checkpoint,
    trainer,
)
from megascale.interop.named_state import FoundState, Names
from megascale.interop.scaler_state import FoundScaler
from megascale.interop.source import Source
from megascale.state.schema import KEYS
from megascale.utils import validate

AUTO = "auto"


@dataclass(frozen=True)
class Format:
    """The functions that recognise and read one system's checkpoints. Finders return None if there is nothing."""

    recognises: Callable[[Source], bool]
    find_scaler: Callable[[Source], FoundScaler | None]
    find_state: Callable[[Source, Names | None], FoundState | None]


# The first that recognises a source reads it, so specific formats come before general ones.
FORMATS = {
    "megatron": Format(megatron.recognises, megatron.find_scaler, megatron.find_state),
    "deepspeed": Format(deepspeed.recognises, deepspeed.find_scaler, deepspeed_groups.find_state),
    "transformers": Format(trainer.recognises, trainer.find_scaler, trainer.find_state),
    "accelerate": Format(accelerate.recognises, accelerate.find_scaler, accelerate.find_state),
    "lightning": Format(lightning.recognises, lightning.find_scaler, lightning.find_state),
    "torch": Format(torch_checkpoint.recognises, torch_amp.find_scaler, torch_checkpoint.find_state),
}


def format_of(source: Source, name: str = AUTO) -> Format:
    """Return the format of that name, or the one that recognises ``source``.

    Raises:
        InteropError: none does, or it is megascale's own.
        ArgumentError: there is no format of that name.
    """
    validate.one_of("format", name, (AUTO, *FORMATS))
    if set(KEYS) <= source.top_keys():
        raise InteropError(f"{source.where} is megascale's own; load it with load_state_dict()")
    if source.files(MANIFEST_NAME, f"*/{MANIFEST_NAME}"):
        raise InteropError(f"{source.where} is megascale's own; load it with megascale.checkpoint.load()")
    if name != AUTO:
        return FORMATS[name]
    for candidate in FORMATS.values():
        if candidate.recognises(source):
            return candidate
    there = ", ".join(sorted(map(str, source.top_keys()))[:12]) or ", ".join(
        path.name for path in source.files("*")[:12]
    )
    raise InteropError(
        f"{source.where} is no checkpoint of {', '.join(FORMATS)} that is known; it has {there or 'nothing'}"
    )
