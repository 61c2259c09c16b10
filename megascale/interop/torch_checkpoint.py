"""Reads training checkpoints of plain torch: dicts of state dicts, under any keys."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megascale.errors import InteropError, listed
from megascale.interop import torch_amp
from megascale.interop.named_state import (
    FoundState,
    Names,
    by_group,
    check_shapes,
    is_torch_state,
    named,
    own,
    portable_mapping,
    sizes_of,
)
from megascale.interop.naming import names_by_order
from megascale.interop.source import Source
from megascale.utils.dtypes import HALF_DTYPES

SYSTEM = "torch"
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net")


def recognises(source: Source) -> bool:
    """Whether ``source`` is a GradScaler's or an optimizer's state dict, or a dict with one in it."""
    return torch_amp.recognises(source) or is_torch_state(source.content) or bool(_optimizers(source))


def find_state(source: Source, names: Names | None = None) -> FoundState | None:
    """Return the optimizer's state, and the fp32 weights as main params; None if no optimizer's state is in it.

    Raises:
        InteropError: there are several optimizers, or names cannot be determined without guessing.
    """
    if is_torch_state(source.content):
        return named_torch_state(SYSTEM, source.content, None, names, source.where)
    optimizers = _optimizers(source)
    if len(optimizers) > 1:
        raise InteropError(
            f"{source.where} holds {len(optimizers)} optimizers, {', '.join(optimizers)}; save a checkpoint for each"
        )
    models = _models(source)
    for saved in optimizers.values():
        return named_torch_state(SYSTEM, saved, models[0] if len(models) == 1 else None, names, source.where)
    return None


def _optimizers(source: Source) -> dict[str, Any]:
    content = source.content if isinstance(source.content, Mapping) else {}
    return {str(key): value for key, value in content.items() if is_torch_state(value)}


def _models(source: Source) -> list[Mapping[str, Any]]:
    candidates = {key: value for key, value in source.content.items() if _is_model(value)}
    preferred = [candidates[key] for key in MODEL_KEYS if key in candidates]
    return preferred[:1] or list(candidates.values())


def _is_model(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and any(isinstance(item, Tensor) and item.dim() > 0 for item in value.values())
    )


def named_torch_state(
    system: str,
    saved: Any,
    model: Mapping[str, Any] | None,
    names: Names | None,
    where: str,
    *,
    ordered: bool = True,
) -> FoundState:
    """Return the named state of a torch optimizer over the model's own weights, which are their own main params.

    Args:
        system: for the report.
        saved: the optimizer's state dict.
        model: the model's, if it is known.
        names: of the parameters; None: as recorded, or in the model's order.
        where: for messages.
        ordered: whether ``model`` keeps the order of parameters.

    Raises:
        InteropError: ``saved`` is no torch optimizer's, a name is not in the model or has another shape there, or names
            cannot be determined.
    """
    if not is_torch_state(saved):
        raise InteropError(f"{where} holds an optimizer's state that is not torch's")
    if names is None:
        grouped = names_by_order(saved, model if ordered else None, where)
    else:
        grouped = by_group(names, sizes_of(saved), where)
    groups, states = named(saved, grouped, where)
    mapped = ["the optimizer's state, and its groups' options"]
    notes = ["epochs, LR schedule and random states stay in the file"]
    mains: dict[str, Tensor] = {}
    if model is None:
        notes.append("no model is in it, so no main params: load into a model of fp32 weights, loaded before")
    else:
        if unknown := [name for name in chain(*grouped) if not isinstance(model.get(name), Tensor)]:
            raise InteropError(f"{where}: the model has no parameter {listed(unknown)}")
        check_shapes(states, model, where)
        mains = {name: _as_main(model[name]) for name in chain(*grouped)}
        mapped.append(f"{len(mains)} weights as main params: the optimizer updated them")
        if any(model[name].dtype in HALF_DTYPES for name in mains):
            notes.append("some weights are 16-bit and have no main params in it: the weights become these, in fp32")
    extra = portable_mapping({key: saved[key] for key in saved if key not in ("state", "param_groups")}, where)
    if extra:
        mapped.append(f"{', '.join(extra)}: of the optimizer's own state_dict()")
    return FoundState(system, groups, states, mains, tuple(mapped), tuple(notes), extra)


def _as_main(weight: Tensor) -> Tensor:
    return own(weight if weight.dtype == torch.float64 else weight.float())
