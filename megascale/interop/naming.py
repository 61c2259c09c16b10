"""Finds the names of numbered parameters by comparing weights with their main params."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megascale.errors import InteropError, listed
from megascale.interop.named_state import recorded_names, sizes_of, weights_in
from megascale.utils.dtypes import HALF_DTYPES

BUFFERS = ("running_mean", "running_var")
REMEDY = (
    "give the names in the order of the optimizer's parameters: --model-names FILE, a JSON list; with one param "
    "group [name for name, _ in model.named_parameters()], with more a list of such a list for each"
)


def names_by_rounding(mains: Sequence[Sequence[Tensor]], model: Mapping[str, Any], where: str) -> list[list[str]]:
    """Return the names, by group, of the 16-bit weights that the main params round to, bit for bit.

    Weights with equal bits (such as biases of zeros) get their main params in the model's order; they must be in one
    group.

    Raises:
        InteropError: a main param rounds to no weight, or a weight fits several groups.
    """
    weights = {name: value for name, value in weights_in(model).items() if value.dtype in HALF_DTYPES}
    names: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, value in weights.items():
        names[_fingerprint(value)].append(name)
    dtypes = {value.dtype for value in weights.values()}
    places: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for group, own in enumerate(mains):
        for position, main in enumerate(own):
            matches = [key for dtype in dtypes if (key := _fingerprint(main.to(dtype))) in names]
            if len(matches) != 1:
                raise InteropError(
                    f"{where}: main param {position} of group {group}, shape {tuple(main.shape)}, rounds to none of "
                    f"the model's weights; {REMEDY}"
                )
            places[matches[0]].append((group, position))
    found: dict[tuple[int, int], str] = {}
    for key, spots in places.items():
        if len(spots) != len(names[key]) or len({group for group, _ in spots}) != 1:
            raise InteropError(f"{where}: the weights {', '.join(names[key])} are alike in every bit; {REMEDY}")
        found |= dict(zip(spots, names[key], strict=True))
    return [[found[group, position] for position in range(len(own))] for group, own in enumerate(mains)]


def _fingerprint(value: Tensor) -> tuple[Any, ...]:
    data = bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return value.dtype, tuple(value.shape), hashlib.sha256(data).hexdigest()


def names_by_order(saved: Mapping[str, Any], model: Mapping[str, Any] | None, where: str) -> list[list[str]]:
    """Return the names of a torch optimizer's parameters: recorded in it, or in the order of the model's weights.

    The order is used only if there is one param group, as of ``AdamW(model.parameters())``; the state's shapes must
    fit.

    Raises:
        InteropError: the names cannot be determined without guessing.
    """
    recorded = recorded_names(saved)
    if recorded is not None:
        return recorded
    sizes = sizes_of(saved)
    if model is None:
        raise InteropError(f"{where} holds no model in the order of its parameters; {REMEDY}")
    if len(sizes) != 1:
        raise InteropError(
            f"{where} has {len(sizes)} param groups, and does not record which parameter is in which; {REMEDY}"
        )
    names = [name for name in weights_in(model) if name.rpartition(".")[2] not in BUFFERS]
    if len(names) != sizes[0]:
        raise InteropError(
            f"{where}: the model has {len(names)} weights, the optimizer {sizes[0]} parameters (some are frozen, or in "
            f"no optimizer, or buffers); {REMEDY}"
        )
    return [names]


def check_rounding(mains: Mapping[str, Tensor], model: Mapping[str, Any], where: str) -> None:
    """Raise InteropError if a 16-bit weight of ``model`` is not the rounded main param of its name, bit for bit."""
    differ = not_rounded(mains, model)
    if differ:
        raise InteropError(
            f"{where}: the model's weights {listed(differ)} are not their main params, rounded: the files do "
            "not belong together, as a rank's file of another save or rank; or, where no names are recorded, they are "
            f"in another order: {REMEDY}"
        )


def not_rounded(mains: Mapping[str, Tensor], model: Mapping[str, Any]) -> list[str]:
    """Return the names of 16-bit weights of ``model`` that are not their rounded main params, bit for bit."""
    return [
        name
        for name, main in mains.items()
        if isinstance(weight := model.get(name), Tensor)
        and weight.dtype in HALF_DTYPES
        and _fingerprint(main.to(weight.dtype)) != _fingerprint(weight)
    ]
