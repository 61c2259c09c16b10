"""The optimizer's state as ``torch.distributed.checkpoint.state_dict`` expects it, made from our layout and read back.

``get_optimizer_state_dict(model, optimizer)`` and the like know only a torch optimizer's layout: ``{"state": {key:
{...}}, "param_groups": [{..., "params": [key, ...]}]}``, with positions or qualified names for keys. Everything else of
ours goes into every parameter's state, next to the moments, as they carry that along.

- ``main_param``: fp32, of the parameter's shape; absent for parameters that are their own main params.
- ``grad_scaler_scale``, ``grad_scaler_growth_tracker``, ``grad_scaler_hysteresis_tracker``: 0-d, the
  scaler's.
- ``num_states``: 0-d int64, how many entries the wrapped optimizer has for the parameter. Some of those functions drop
  entries that the live optimizer lacks; this number reveals it.
- ``step_counts_landed``, ``step_counts_skipped``: 0-d int64.
"""

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megascale.errors import StateDictError, listed
from megascale.state.schema import EXTRA_STATE, SHARED_STATE
from megascale.step.compact_state import is_code
from megascale.step.result import COUNT_KEYS
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.nests import are_equal
from megascale.utils.param_names import renames

TORCH_KEYS = ("state", "param_groups")
MAIN_PARAM = "main_param"
NUM_STATES = "num_states"
SHARED = {
    what: {key: f"{what}_{key}" for key in keys}
    for what, keys in (
        ("grad_scaler", ("scale", "growth_tracker", "hysteresis_tracker")),
        ("step_counts", COUNT_KEYS),
    )
}
"""What belongs to the optimizer, by its keys in our layout: the names of the copies that every parameter has here."""
ADDED = (MAIN_PARAM, NUM_STATES, *SHARED["grad_scaler"].values(), *SHARED["step_counts"].values())
TAKEN = frozenset(ADDED)


class StateDict(dict[str, Any]):
    """Our state dict, which becomes torch's layout when ``["state"]`` or ``["param_groups"]`` is read or written.

    Both count as contained, but are not among its keys before: it iterates and prints as our layout. Asked for one of
    them, it has these two alone, with the same tensors: torch's functions write to them, programs set a rate there, or
    take one out by :meth:`pop`. So there is one layout at a time, which is saved, copied and loaded as it is. Torch's
    carries all that ours does.

    Copied or pickled ours is a plain ordered dict, in which ``state`` and ``param_groups`` are
    ``["optimizer"]["state"]`` and ``["optimizer"]["param_groups"]`` themselves: what is written to one is the other's,
    and a torch optimizer loads the dict. Without ``state`` where moments are 8-bit codes, which torch cannot read.
    """

    def __missing__(self, key: str) -> Any:
        if key not in TORCH_KEYS or "optimizer" not in self:
            raise KeyError(
                key if "optimizer" in self else f"{key} (it was read as torch's layout: call state_dict() again)"
            )
        layout = to_torch_layout(self)
        self.clear()
        self.update(layout)
        return self[key]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (key in TORCH_KEYS and super().__contains__("optimizer"))

    def __setitem__(self, key: str, value: Any) -> None:
        self.get(key)  # one of torch's two replaces that of its layout, beside the other one
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    # dict's own ask none of the above.
    get = Mapping.get  # type: ignore[assignment]
    setdefault, update = MutableMapping.setdefault, MutableMapping.update

    def pop(self, key: str, *default: Any) -> Any:
        """Take an entry out. If it is one of torch's two, the other one stays."""
        self.get(key)
        return super().pop(key, *default)

    def copy(self) -> dict[str, Any]:
        """Return a shallow copy, as :func:`torch.load` returns it: torch's optimizers copy what they load."""
        plain = OrderedDict(self)
        own = plain.get("optimizer", {})
        entries = chain.from_iterable(state.items() for state in own.get("state", {}).values())
        # Torch would take codes for moments: it finds no state to load.
        hidden = "state" if any(is_code(key, value) for key, value in entries) else None
        keys = [key for key in TORCH_KEYS if key in own and key != hidden]
        return OrderedDict([*plain.items(), *((key, own[key]) for key in keys)])

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.copy().items())

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateDict":
        return StateDict(deepcopy(dict(self), memo))


def require_one_layout(state_dict: Any) -> None:
    """Raise StateDictError if a state dict of ours has another ``state`` or ``param_groups`` beside than inside."""
    own: Any = state_dict.get("optimizer") if isinstance(state_dict, Mapping) else None
    for key in set(TORCH_KEYS).intersection(state_dict) if isinstance(own, Mapping) else ():
        if not are_equal(state_dict[key], own.get(key)):
            raise StateDictError(
                f"state dict's {key!r} is another one than its ['optimizer'][{key!r}], which is loaded: write to that "
                f"one, or leave {key!r} out"
            )


def to_torch_layout(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return our layout as torch's, keyed by position. New dicts and lists, the same tensors.

    Raises StateDictError for state that torch's functions cannot carry, naming it.
    """
    if others := [key for one in own["optimizer"].get(SHARED_STATE, []) for key in one]:
        is_extra = others[0] == EXTRA_STATE
        what = "what the optimizer's own state_dict() has" if is_extra else f"optimizer.state[{others[0]!r}]"
        raise StateDictError(
            f"{what} belongs to no parameter, and torch.distributed.checkpoint carries only state that does; use "
            "state_dict() itself, or megascale.checkpoint"
        )
    # Torch's functions carry state of parameters alone. So what belongs to the optimizer (scaler, counts, norms) is put
    # into each parameter's entry, and its main param beside it.
    names = [name for group in own["optimizer"]["param_groups"] for name in group["params"]]
    positions = {name: position for position, name in enumerate(names)}
    shared = shared_entries(own)
    state: dict[int, Any] = {}
    for name, position in positions.items():
        entries = own["optimizer"]["state"][name]
        require_free_names(name, entries)
        own_copies = {key: value.clone() for key, value in shared.items()}  # some file formats refuse shared memory
        state[position] = dict(entries) | own_copies | {NUM_STATES: torch.tensor(len(entries), device="cpu")}
        if name in own["main_params"]:
            state[position][MAIN_PARAM] = own["main_params"][name]
    groups = [
        group | {"param_names": list(group["params"]), "params": [positions[name] for name in group["params"]]}
        for group in own["optimizer"]["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def shared_entries(own: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the entries that every parameter has a copy of, from a state dict of ours: 0-d, in host memory."""
    return {f"{what}_{key}": _zero_dim(value) for what in SHARED for key, value in own.get(what, {}).items()}


def _zero_dim(value: Any) -> Tensor:
    """Return a number, int64 or fp64, or a tensor of one element, of its own dtype, as a 0-d tensor in host memory."""
    if isinstance(value, Tensor):
        return value.reshape(()).cpu()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64, device="cpu")


def require_free_names(name: str, entries: Mapping[str, Any]) -> None:
    """Raise StateDictError for an optimizer whose ``entries`` of parameter ``name`` have a name that we add."""
    if taken := sorted(TAKEN.intersection(entries)):
        raise StateDictError(f"optimizer state of {name!r} has entries called {taken}, names that megascale needs")


def from_torch_layout(given: Mapping[str, Any], live: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return torch's layout as ours. Changes neither.

    A parameter without an entry in ``state`` keeps its live state: torch's functions have raised already, unless
    ``StateDictOptions(strict=False)`` forbade it or the parameter is frozen. A plain torch optimizer's has no main
    params and no scaler's state: nor has what is returned.

    Args:
        given: as a function of ``torch.distributed.checkpoint.state_dict`` passes it to ``load_state_dict``, or as a
            torch optimizer has saved it.
        live: our layout of the optimizer that loads.
        strict: raise if some main params are in it, and others are not.

    Raises:
        StateDictError: naming what is missing or does not fit.
    """
    _check(given)
    names = _names_by_key(given["param_groups"], [group["params"] for group in live["optimizer"]["param_groups"]])
    shared = _shared_state(given, names, live)
    extra = {key: value for key, value in given.items() if key not in TORCH_KEYS}
    if extra and any(EXTRA_STATE in one for one in live["optimizer"].get(SHARED_STATE, [])):
        shared[EXTRA_STATE] = extra
    states, mains, without_main = dict(live["optimizer"]["state"]), dict(live["main_params"]), []
    copies: dict[str, list[dict[str, Any]]] = {what: [] for what in SHARED}
    for key, entries in given["state"].items():
        if key in shared:
            continue
        name = names[key]
        there = _present(entries)
        states[name] = {what: value for what, value in there.items() if what not in TAKEN}
        expected = there.get(NUM_STATES)  # None: not known
        if expected is not None and len(states[name]) != int(expected):
            raise StateDictError(
                f"optimizer state of {name!r} had {int(expected)} entries and arrives with {sorted(states[name])}: "
                "torch.distributed.checkpoint reads only names that the live one has. Build it with the same options. "
                "If it makes its state at its first step: give load_state_dict() a full state dict, or use "
                "megascale.checkpoint"
            )
        for what, entry_names in SHARED.items():
            copies[what].append({key: there[entry] for key, entry in entry_names.items() if entry in there})
        if MAIN_PARAM in there:
            mains[name] = there[MAIN_PARAM]
        elif name in mains:  # a torch optimizer's, which made it of 16-bit parameters
            without_main.append(name)
            states[name] = {what: _wide(value, mains[name]) for what, value in states[name].items()}
    has_mains = any(MAIN_PARAM in _present(given["state"][key]) for key in given["state"].keys() - shared.keys())
    if strict and has_mains and without_main:
        raise StateDictError(
            f"state dict holds main params, but none of {listed(without_main)}: give load_state_dict() all that "
            "state_dict() has returned, or all entries of optimizer.state"
        )
    # Each entry had a copy: if copies differ, entries of several checkpoints were mixed.
    found = {what: _common_value(what, copies[what], live.get(what, {})) for what in SHARED}
    scaler, has_entries = found.pop("grad_scaler"), bool(copies["grad_scaler"])
    packed = [
        {option: value for option, value in group.items() if option != "param_names"}
        | {"params": [names[key] for key in group["params"]]}
        for group in given["param_groups"]
    ]
    return {
        "optimizer": {"state": states, "param_groups": packed} | ({SHARED_STATE: [shared]} if shared else {}),
        "main_params": {} if without_main and not has_mains else mains,
        "grad_scaler": scaler if scaler or (strict and has_entries) else live["grad_scaler"],
        "version": live["version"],
    } | {key: value for key, value in found.items() if value}


def _present(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries without those that stand for none: of a copy of ``optimizer.state`` an added one of None.

    Torch's functions make an empty dict of an entry that a flattened state dict lacks.
    """
    return {
        what: value
        for what, value in entries.items()
        if not (isinstance(value, Mapping) and not value) and not (value is None and what in TAKEN)
    }


def _wide(value: Any, main: Tensor) -> Any:
    """Return a 16-bit tensor of a main param's shape in fp32; any other value itself."""
    is_wide = not isinstance(value, Tensor) or value.dtype not in HALF_DTYPES or value.shape != main.shape
    return value if is_wide else value.float()


def _check(given: Mapping[str, Any]) -> None:
    if not isinstance(given.get("state"), Mapping):
        raise StateDictError("state dict's 'state' must map parameters to dicts")
    groups = given["param_groups"]
    if not isinstance(groups, Sequence) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        raise StateDictError("state dict's 'param_groups' must be a list of dicts with 'params'")


def _shared_state(given: Mapping[str, Any], names: Mapping[Any, str], live: Mapping[str, Any]) -> dict[Any, Any]:
    """Return state that belongs to no parameter: torch keeps it beside the parameters, under a key that is no position.

    Raises StateDictError for state of an unknown parameter, or state of one that is no dict.
    """
    has_positions = all(isinstance(key, int) for key in names)
    known = {key for one in live["optimizer"].get(SHARED_STATE, []) for key in one}
    shared = {
        key: value
        for key, value in given["state"].items()
        if key not in names and (key in known or (has_positions and not isinstance(key, int)))
    }
    if unknown := [key for key in given["state"] if key not in names and key not in shared]:
        raise StateDictError(f"state dict holds state of {listed(unknown)}, which none of its param groups has")
    if not all(isinstance(entries, Mapping) for key, entries in given["state"].items() if key in names):
        raise StateDictError("state dict's 'state' must map parameters to dicts")
    return shared


def _names_by_key(groups: Sequence[Mapping[str, Any]], live: Sequence[Sequence[str]]) -> dict[Any, str]:
    """Return our name for each key in ``params``: its own name if it has one, else the name at its position.

    A string is a name; positions may have theirs in ``param_names``. Names count if one side has all of the other's.
    """
    keys = [key for group in groups for key in group["params"]]
    names = [name for group in live for name in group]
    are_positions = names == [str(position) for position in range(len(names))]
    are_named = all(isinstance(key, str) for key in keys)
    given = keys if are_named else [name for group in groups for name in group.get("param_names") or ()]
    if not are_positions and len({*given}) == len(keys):
        new = renames(given, names, "state dict")
        found = [new.get(name, name) for name in given]
        if {*found} <= {*names} or {*names} <= {*found}:
            return dict(zip(keys, found, strict=True))
    sizes, live_sizes = [len(group["params"]) for group in groups], [len(group) for group in live]
    if sizes != live_sizes:
        raise StateDictError(
            f"state dict has param groups of {sizes} parameters, the optimizer has {live_sizes}; build the same groups"
        )
    return dict(zip(keys, names, strict=True))


def _common_value(what: str, every: Sequence[Mapping[str, Any]], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value of which every parameter has a copy, such as the scaler's. Raises StateDictError if they differ.

    With ``full_state_dict=True`` torch's functions fill in the loading optimizer's ``live`` entries for parameters that
    are frozen or missing in the file: such copies are ignored.
    """
    found: dict[str, Any] = {}
    for key in every[0] if every else ():
        copies = [_zero_dim(one[key]).detach() for one in every if key in one]
        values = set(torch.stack(copies).tolist())
        if len(values) > 1 and key in live:
            values.discard(_zero_dim(live[key]).item())
        if len(values) > 1 or len(copies) != len(every):
            raise StateDictError(
                f"the parameters of the state dict have several values of {f'{what}_{key}'!r}, {sorted(values)[:4]}"
                "; they are not of one step"
            )
        [found[key]] = values
    return found
