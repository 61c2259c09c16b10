"""Reads Lightning's ``.ckpt`` files: torch's states under Lightning's keys."""

from typing import Any

from megascale.errors import InteropError
from megascale.interop import torch_amp
from megascale.interop.named_state import FoundState, Names
from megascale.interop.scaler_state import FoundScaler
from megascale.interop.source import Source
from megascale.interop.torch_checkpoint import named_torch_state

SYSTEM = "Lightning"


def recognises(source: Source) -> bool:
    """Whether ``source`` is a Lightning checkpoint."""
    keys = source.top_keys()
    return "pytorch-lightning_version" in keys or {"state_dict", "optimizer_states"} <= keys


def find_scaler(source: Source) -> FoundScaler | None:
    """Return the precision plugin's scaler: under "MixedPrecision", "FSDPPrecision", or an older release's name."""
    states = torch_amp.states_in(source.content)
    if not states:
        return None
    key, state = torch_amp.chosen(states, source.where)
    return torch_amp.parse(state, SYSTEM, (f"precision plugin {key!r}",))


def find_state(source: Source, names: Names | None = None) -> FoundState | None:
    """Return the optimizer's state, and the weights as main params; None if it was saved with save_weights_only."""
    optimizers: Any = source.entry("optimizer_states") or []
    if len(optimizers) > 1:
        raise InteropError(f"{source.where} holds {len(optimizers)} optimizers; one is converted at a time")
    for saved in optimizers:
        return named_torch_state(SYSTEM, saved, source.entry("state_dict"), names, source.where)
    return None
