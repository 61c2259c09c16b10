"""Reads Accelerate's folders, as ``Accelerator.save_state`` writes them."""

from typing import Any

from megascale.errors import InteropError
from megascale.interop import torch_amp
from megascale.interop.files import read_file
from megascale.interop.named_state import FoundState, Names
from megascale.interop.scaler_state import FoundScaler
from megascale.interop.source import Source
from megascale.interop.torch_checkpoint import named_torch_state

SYSTEM = "Accelerate"
SCALER = "scaler.pt"
MODELS = ("model.safetensors", "pytorch_model.bin")


def recognises(source: Source) -> bool:
    """Whether ``source`` is a folder with Accelerate's scaler or optimizer in it."""
    return bool(source.files(SCALER, "optimizer.bin"))


def find_scaler(source: Source) -> FoundScaler | None:
    """Return the scaler's state; None if there is no ``scaler.pt``: ``mixed_precision`` was not "fp16"."""
    return torch_amp.find_in_file(source, SCALER, SYSTEM)


def find_state(source: Source, names: Names | None = None) -> FoundState | None:
    """Return the optimizer's state, and the weights as main params; None if there is no ``optimizer.bin``.

    A safetensors file does not keep the order of parameters, so their names must be recorded or given.
    """
    files = source.files("optimizer.bin", "optimizer_[0-9]*.bin")
    if len(files) > 1:
        raise InteropError(f"{source.where} holds {len(files)} optimizers; one is converted at a time")
    for path in files:
        saved: Any = read_file(path)
        models = source.files(*MODELS)
        model = read_file(models[0]) if models else None
        ordered = bool(models) and models[0].suffix != ".safetensors"
        return named_torch_state(SYSTEM, saved, model, names, source.where, ordered=ordered)
    return None
