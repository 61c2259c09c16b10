"""Converts a torch optimizer's state dict, keyed by number, to megascale's state dict, keyed by name."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megascale.errors import InteropError, StateDictError
from megascale.interop.records import InertRecord
from megascale.rules import MOMENTS
from megascale.state.schema import EXTRA_STATE, SHARED_STATE, VERSION
from megascale.utils.portable import portable

Names = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class FoundState:
    """Main params and optimizer state, read from another system, in megascale's form.

    Attributes:
        system: name of the other system.
        groups: options of each param group, with its parameters' names under "params".
        states: by parameter name.
        main_params: by parameter name, fp32.
        mapped: one line for each thing that was taken over.
        not_mapped: one line, with the reason, for each thing that was not taken over or differs.
        extra: what the optimizer's own ``state_dict()`` has beside state and groups.
    """

    system: str
    groups: list[dict[str, Any]] = field(default_factory=list)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    main_params: dict[str, Tensor] = field(default_factory=dict)
    mapped: tuple[str, ...] = ()
    not_mapped: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def state_dict(self, grad_scaler: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict for ``MixedPrecisionOptimizer.load_state_dict``. ``grad_scaler``: its state."""
        shared = {SHARED_STATE: [{EXTRA_STATE: self.extra}]} if self.extra else {}
        return {
            "optimizer": {"state": self.states, "param_groups": self.groups, **shared},
            "main_params": self.main_params,
            "grad_scaler": dict(grad_scaler),
            "version": VERSION,
        }


def is_torch_state(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether ``value`` looks like a torch optimizer's state dict."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def sizes_of(saved: Mapping[str, Any]) -> list[int]:
    """Return the number of parameters in each group."""
    return [len(group["params"]) for group in saved["param_groups"]]


def recorded_names(saved: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the names by group that an optimizer built from named parameters records, or None."""
    groups = saved["param_groups"]
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return [list(group["params"]) for group in groups]
    if all("param_names" in group for group in groups):
        return [list(group["param_names"]) for group in groups]
    return None


def by_group(names: Names, sizes: Sequence[int], where: str) -> list[list[str]]:
    """Return ``names`` by group, from names by group or from one list in the order of the groups.

    Raises:
        InteropError: their numbers do not fit, or a name occurs twice.
    """
    nested = [[entry] if isinstance(entry, str) else list(entry) for entry in names]
    flat = [name for group in nested for name in group]
    if len(set(flat)) != len(flat):
        raise InteropError(f"parameter name {next(n for n in flat if flat.count(n) > 1)!r} is given twice")
    if all(isinstance(entry, str) for entry in names):
        if len(flat) != sum(sizes):
            raise InteropError(f"{len(flat)} parameter names are given, {where} has {sum(sizes)} parameters")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [flat[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    if (given := [len(group) for group in nested]) != list(sizes):
        raise InteropError(f"parameter names are given for groups of {given}, {where} has groups of {list(sizes)}")
    return nested


def named(
    saved: Mapping[str, Any], names: Sequence[Sequence[str]], where: str
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the groups and states of a torch optimizer's state dict by name, its tensors copied.

    Raises:
        InteropError: it holds a value that our state dict cannot, naming it.
    """
    groups: list[dict[str, Any]] = []
    states: dict[str, dict[str, Any]] = {}
    common = saved["state"].get("common_step")
    for index, (group, own) in enumerate(zip(saved["param_groups"], names, strict=True)):
        check_adam(group, f"{where}, group {index}")
        step = group.get("step", common)
        for key, name in zip(group["params"], own, strict=True):
            state = saved["state"].get(key, {})
            states[name] = _portable_state(state if step is None or not state else {"step": step} | state, name)
        options = {key: value for key, value in group.items() if key not in ("params", "param_names", "step")}
        groups.append(portable_mapping(options, f"{where}, group {index}") | {"params": list(own)})
    return groups, states


def check_adam(group: Mapping[str, Any], where: str) -> None:
    """Raise InteropError for an option of other systems' Adam that torch's lacks."""
    if group.get("bias_correction", True) in (False, 0):
        raise InteropError(f"{where} has bias_correction=False; torch's Adam always corrects, so it cannot go on alike")


def check_shapes(states: Mapping[str, Mapping[str, Any]], like: Mapping[str, Any], where: str) -> None:
    """Raise InteropError if a state per element has another shape than the tensor of that name in ``like``.

    State is per element where its shapes are those of all parameters, in any order; a moment of our rules
    always is, Adafactor's rows are not.
    """
    for key in dict.fromkeys(chain.from_iterable(states.values())):
        values = {name: state[key] for name, state in states.items() if isinstance(state.get(key), Tensor)}
        shapes = {
            name: (tuple(value.shape), tuple(like[name].shape))
            for name, value in values.items()
            if value.dim() > 0 and isinstance(like.get(name), Tensor)
        }
        is_per_element = Counter(found for found, _ in shapes.values()) == Counter(
            wanted for _, wanted in shapes.values()
        )
        for name, (shape, parameter) in shapes.items():
            if shape != parameter and (is_per_element or key in MOMENTS):
                raise InteropError(
                    f"{where}: {key} of {name!r} has shape {shape}, the parameter has {parameter}; the names are in "
                    "another order than the optimizer's parameters: give them with --model-names"
                )


def own(value: Tensor) -> Tensor:
    """Return a copy with its own memory: a view would be saved with its whole storage."""
    return value.detach().contiguous().clone()


def step_tensor(step: Any) -> Tensor:
    """Return a step count as torch's Adam keeps it: fp32, 0-d."""
    return torch.as_tensor(step, dtype=torch.float32).reshape(()).clone()


def _portable_state(state: Any, name: str) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise InteropError(f"optimizer state of {name!r} is {state!r}, which cannot be read")
    packed: dict[str, Any] = portable_mapping(state, f"optimizer state of {name!r}")
    if isinstance(packed.get("step"), (int, float, Tensor)):
        packed["step"] = step_tensor(packed["step"])
    return {key: own(value) if isinstance(value, Tensor) else value for key, value in packed.items()}


def portable_mapping(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return ``value`` as a state dict can hold it. Raises InteropError, naming what it cannot hold."""
    if strange := [key for key, item in value.items() if isinstance(item, InertRecord)]:
        raise InteropError(
            f"{where}: {strange[0]!r} is {value[strange[0]]!r}; save plain tensors (of a sharded checkpoint: "
            "consolidate it first)"
        )
    try:
        packed: dict[str, Any] = portable(value, where, copy=False)
    except StateDictError as error:
        raise InteropError(str(error)) from None
    return packed


def weights_in(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating point tensors of a model's state dict in its order; of tied ones only the first."""
    seen: set[tuple[Any, ...]] = set()
    weights: dict[str, Tensor] = {}
    for name, value in model.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape)
            if place not in seen or value.numel() == 0:
                seen.add(place)
                weights[name] = value
    return weights
