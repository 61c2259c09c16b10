"""Reads the ``checkpoint-*`` folders of Hugging Face's Trainer."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megascale.errors import InteropError
from megascale.interop import torch_amp
from megascale.interop.files import read_file
from megascale.interop.named_state import FoundState, Names, is_torch_state, recorded_names
from megascale.interop.naming import REMEDY
from megascale.interop.scaler_state import FoundScaler
from megascale.interop.source import Source
from megascale.interop.torch_checkpoint import named_torch_state
from megascale.state.schema import KEYS

SYSTEM = "the Trainer"
PROGRESS, OPTIMIZER, SCALER, CONFIG = "trainer_state.json", "optimizer.pt", "scaler.pt", "config.json"
INDEX = "model.safetensors.index.json"
MODELS = ("model.safetensors", "pytorch_model.bin")


def recognises(source: Source) -> bool:
    """Whether ``source`` is a folder with the Trainer's progress in it."""
    return bool(source.files(PROGRESS))


def find_scaler(source: Source) -> FoundScaler | None:
    """Return the scaler's state; None if there is no ``scaler.pt``: the run was not one of ``fp16=True``."""
    return torch_amp.find_in_file(source, SCALER, SYSTEM)


def find_state(source: Source, names: Names | None = None) -> FoundState | None:
    """Return the optimizer's state, and the weights as main params.

    The optimizer's parameters are numbered by param group, the decayed ones first. Their names are those given, or
    those of the model that ``config.json`` describes, built by transformers on the meta device.

    Raises:
        InteropError: there is no torch optimizer's state, or names cannot be determined without guessing.
    """
    files = source.files(OPTIMIZER)
    if not files:
        raise InteropError(
            f"{source.where} has no {OPTIMIZER}: save with save_only_model=False, and without FSDP, whose files are "
            "those of torch.distributed.checkpoint"
        )
    saved: Any = read_file(files[0])
    if isinstance(saved, Mapping) and set(KEYS) <= set(saved):
        raise InteropError(
            f"{files[0]} is megascale's own; load it with load_state_dict(), or resume with adopt(trainer)"
        )
    if names is None and is_torch_state(saved) and recorded_names(saved) is None:
        names = _names_of_model(source)
    return named_torch_state(SYSTEM, saved, _weights(source), names, source.where, ordered=False)


def _weights(source: Source) -> dict[str, Any] | None:
    for path in source.files(INDEX):
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        return {name: value for shard in shards for name, value in read_file(path.parent / Path(shard).name).items()}
    models = source.files(*MODELS)
    weights: dict[str, Any] | None = read_file(models[0]) if models else None
    return weights


def _names_of_model(source: Source) -> list[list[str]]:
    """Return the names of the parameters by param group, as the Trainer makes the groups. Raises InteropError.

    No weight is made, and no code but that of transformers runs.
    """
    if not source.files(CONFIG) or importlib.util.find_spec("transformers") is None:
        raise InteropError(
            f"{source.where} does not record the names of the optimizer's parameters, and they are found only where "
            f"it has a {CONFIG} and transformers is installed; {REMEDY}"
        )
    import transformers

    config = transformers.AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise InteropError(f"{source.where}: transformers has no model {config.architectures}; {REMEDY}")
    with torch.device("meta"):
        model = kind(config)
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    names = [name for name, _ in model.named_parameters()]
    return [[name for name in names if (name in decayed) == is_decayed] for is_decayed in (True, False)]
