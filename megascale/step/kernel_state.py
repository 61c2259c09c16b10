"""The optimizer state that our kernels read and write: created as torch creates it, in memory that never moves.

State lies in segments: :mod:`megascale.main_params.segments`. The wrapped optimizer's ``state`` shows it, in plain
dicts, whose tensors are those of the segments: a write in place is a write to them. Whatever else a program puts there
is taken in before the next step, save or load: its values are copied into their places, and the dict shows these again.
So an entry may be assigned, deleted, exchanged with another one's, shared by two parameters, or loaded.
"""

import numbers
from collections.abc import Collection, Mapping, Sequence, Set
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.kernels import memory_fault
from megascale.kernels.compact_moments import is_scale
from megascale.main_params.group_scales import scales_like
from megascale.main_params.main_param import MainParam
from megascale.main_params.segments import ALIGNMENT, Form, in_segments
from megascale.rules import CODE_DTYPES
from megascale.rules.options import number
from megascale.step.compact_state import (
    convert_,
    holds_codes,
    is_code,
    require_holdable,
    require_uncast,
    require_whole_codes,
    shape_of,
    with_scales,
)
from megascale.utils.dtensors import dtensor_like, held
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.transfer import to_device_async


class _Place(NamedTuple):
    """A main param, and its state in segments, by name. ``device``: of the main param when they were made."""

    param: MainParam
    tensors: dict[str, Tensor]
    device: torch.device


class _Given(NamedTuple):
    """What a program has put into the state of a parameter, as a copy; the places that there are; and all names."""

    param: MainParam
    entry: dict[str, Any]
    places: Mapping[str, Tensor]
    names: list[str]


class KernelState:
    """The state of one torch optimizer for our kernels, in torch's own layout.

    Args:
        optimizer: its ``state`` may be replaced or cleared at any time.
        dtypes: of the state of fp32 main params, by the state's name.
        optional: names that an existing state may lack, as an option may have been switched on later.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, dtypes: Mapping[str, torch.dtype], optional: Collection[str]
    ) -> None:
        self._optimizer = optimizer
        self._dtypes = dict(dtypes)
        self._optional = frozenset(optional)
        self._is_compact = any(dtype in CODE_DTYPES for dtype in dtypes.values())
        self._places: dict[Tensor, _Place] = {}
        # What the optimizer's state showed after the newest taking in: keys and entries, and our entries' values.
        self._shown: list[Any] = []
        self._entries: list[dict[str, Any]] = []
        self._values: list[Any] = []

    def create(self, params: Sequence[MainParam], names: Sequence[str], *, fills: bool = True) -> None:
        """Give the state of ``params`` its place, with the values of existing state, in the configured dtypes.

        What is missing is zeros, as in torch; also a momentum buffer, whose first gradient is not dampened while
        ``step`` is 0. State of an fp64 parameter is fp64.

        Args:
            names: of the state that the options of their group need.
            fills: create also what an existing state lacks, beside optional names.

        Raises UsageError or ArgumentError, naming the parameter, for state that does not fit: nothing has changed.
        """
        if self._is_compact:
            for param in params:
                require_holdable(param)
        first = [name for name in names if name == "step"]  # in torch's order
        every = list(dict.fromkeys([*first, *with_scales(names, self._dtypes)]))
        # Each step asks for it: what is there already is not taken in, copied and shown anew.
        if not fills and all(self._kept(param).keys() >= set(every) for param in params):
            return
        self._take_in(params, [every] * len(params), fills=fills)
        self._shown = []  # what others show is taken in next time

    def take_in(self) -> bool:
        """Copy what a program has put into the optimizer's state into its places, and show these again.

        Where nothing was put there, nothing is read but whether keys and values are the same objects. Returns whether
        there was something.

        Raises UsageError, naming the parameter, for state that does not fit: nothing has changed.
        """
        state = self._optimizer.state
        if (
            2 * len(state) == len(self._shown)
            and all(map(is_, chain(state, state.values()), self._shown))
            and sum(map(len, self._entries)) == len(self._values)
            and all(map(is_, chain.from_iterable(map(dict.values, self._entries)), self._values))
        ):
            return False
        params = [place.param for place in self._places.values()]
        self._take_in(params, [list(place.tensors) for place in self._places.values()], fills=False)
        self._shown = [*state, *state.values()]
        self._entries = [state[model] for model in self._places]
        self._values = list(chain.from_iterable(map(dict.values, self._entries)))
        return True

    def columns(self, params: Sequence[MainParam], names: Sequence[str]) -> dict[str, list[Tensor]]:
        """Return by name one tensor per parameter; :meth:`create` has made them.

        Raises UsageError for one whose memory was freed.
        """
        columns = {name: [self._places[param.model].tensors[name] for param in params] for name in names}
        for name, column in columns.items():
            for param, tensor in zip(params, column, strict=True):
                if (fault := memory_fault(held(tensor))) is not None:
                    raise UsageError(f"the optimizer's state[{param.name!r}][{name!r}] {fault}; load the state anew")
        return columns

    def load(self, param: MainParam, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the loaded state of one parameter into its places, and return what its dict is to show.

        It was checked, and no value lies in the place of another state. Without places it is returned as it is.
        """
        loaded, places = dict(entry), self._kept(param)
        if places:
            self._copy(param, loaded, places)
        return _showing(loaded, places)

    def _take_in(self, params: Sequence[MainParam], names: Sequence[list[str]], *, fills: bool) -> None:
        """Give state of these names its places, with the values that it has: see :meth:`create`."""
        here = {param for group in self._optimizer.param_groups for param in group["params"]}
        # Parameters that were removed have no place any more; others keep theirs while the main param is where it was.
        self._places = {model: place for model, place in self._places.items() if model in here}
        segments = {_storage(tensor) for place in self._places.values() for tensor in place.tensors.values()} - {0}
        given = []
        for param, wanted in zip(params, names, strict=True):
            if param.model in here:
                places = self._kept(param)
                entry = dict(self._optimizer.state.get(param.model, {}))
                given.append(_Given(param, entry, places, list(dict.fromkeys([*wanted, *places]))))
        # All are checked before the first one changes: a refusal leaves the state as it was. And values that lie in
        # segments are cloned before any place is written: entries may have been exchanged.
        for param, entry, places, wanted in given:
            if any(entry.get(name) is not places.get(name) for name in {*wanted, *filter(is_scale, entry)}):
                self._check(param, entry, wanted, segments, fills=fills)
            for name, value in entry.items():
                is_new = (name in wanted or is_scale(name)) and value is not places.get(name)
                if is_new and isinstance(value, Tensor) and _storage(value) in segments:
                    entry[name] = value.clone()
        # Places are made for all at once, so that those of one name lie side by side, and before the first copy: where
        # there is no memory for them nothing has changed.
        made = self._make(given)
        # Copied one by one: what a program has put there needs no second copy of all state.
        for (param, entry, _, _), places in zip(given, made, strict=True):
            self._copy(param, entry, places)
            self._places[param.model] = _Place(param, places, held(param.main).device)
        # Shown last, in the dicts that there are: two parameters may have shared one, which stays the first one's.
        state, first = self._optimizer.state, dict[int, Any]()
        for key, entry in state.items():
            first.setdefault(id(entry), key)
        for param, *_ in given:
            entry = state.get(param.model, {})
            shown = _showing(entry, self._places[param.model].tensors)
            if first.get(id(entry)) is param.model:
                entry.clear()
                entry.update(shown)
            else:
                state[param.model] = shown

    def _copy(self, param: MainParam, entry: dict[str, Any], places: Mapping[str, Tensor]) -> None:
        """Copy the values of one parameter's state into its places. What is missing is zeros. Changes ``entry``."""
        if "step" in places:
            entry["step"] = _count(entry, held(param.main).device)
        if self._is_compact or holds_codes(entry):
            convert_(entry, self._dtypes, param)
        for name, tensor in places.items():
            value, place = entry.get(name), held(tensor)
            if value is None:
                place.zero_()
            elif value is not tensor:
                place.copy_(held(value).detach().reshape(place.shape))

    def _kept(self, param: MainParam) -> Mapping[str, Tensor]:
        """Return the state of a main param that has its place, where the main param is; none where it has moved."""
        place = self._places.get(param.model)
        return place.tensors if place and place.param is param and place.device == held(param.main).device else {}

    def _make(self, given: Sequence["_Given"]) -> list[dict[str, Tensor]]:
        """Return places for all that is named, new ones where there is none: side by side those of one name."""
        made: list[dict[str, Tensor]] = [dict(one.places) for one in given]
        for name in dict.fromkeys(chain.from_iterable(one.names for one in given)):
            lacking = [at for at, one in enumerate(given) if name in one.names and name not in made[at]]
            forms = [self._form(name, given[at].param) for at in lacking]
            alignment = 1 if name == "step" else ALIGNMENT
            for at, tensor in zip(lacking, in_segments(forms, alignment), strict=True):
                main = given[at].param.main
                placed = scales_like(main, tensor) if is_scale(name) else dtensor_like(tensor, main)
                made[at][name] = tensor if name == "step" else placed
        return [{name: tensors[name] for name in one.names} for tensors, one in zip(made, given, strict=True)]

    def _form(self, name: str, param: MainParam) -> Form:
        main = held(param.main)
        if name == "step":
            return Form(torch.Size(), (), torch.float32, main.device)
        if is_scale(name):
            return Form.like(torch.empty(shape_of(name, param), device="meta"), torch.float32)._replace(
                device=main.device
            )
        return Form.like(main, main.dtype if main.dtype == torch.float64 else self._dtypes[name])

    def _check(
        self, param: MainParam, entry: Mapping[str, Any], names: Sequence[str], segments: Set[int], *, fills: bool
    ) -> None:
        """Raise UsageError for state that cannot be taken in as that of ``param``. ``segments``: addresses of ours."""
        require_uncast(entry, param)
        lacks = [name for name in names if entry.get(name) is None and not is_scale(name)]
        if entry and not fills and not self._optional.issuperset(lacks):
            raise UsageError(
                f"the optimizer's state of {param.name!r} has {sorted(map(str, entry))} and lacks {lacks}; load "
                "state that is whole, or clear it, so that the parameter starts anew"
            )
        for name in dict.fromkeys([*names, *filter(is_scale, entry)]):
            if entry.get(name) is not None:
                _check_value(name, entry[name], param, segments)
        if self._is_compact or holds_codes(entry):
            require_whole_codes(entry, self._dtypes, param)


def _showing(entry: Mapping[str, Any], places: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a parameter's entry with its places, and without scales of codes that are numbers by now."""
    shown = {name: value for name, value in entry.items() if name in places or not (places and is_scale(name))}
    return shown | dict(places)


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return held(tensor).untyped_storage().data_ptr()


def _count(entry: Mapping[str, Any], device: torch.device) -> Tensor | None:
    """Return the number of steps, 0-d fp32, on ``device``; None: 0."""
    step = entry.get("step")
    if step is None:  # an existing momentum has seen a gradient: torch dampens the next one
        step = None if entry.get("momentum_buffer") is None else 1.0
    if step is None or (isinstance(step, Tensor) and step.device == device and step.shape == ()):
        return step
    number_ = step if isinstance(step, Tensor) else torch.as_tensor(step, dtype=torch.float32, device="cpu")
    return to_device_async(number_.detach().reshape(()).float(), device)


def _check_value(name: str, value: Any, param: MainParam, segments: Set[int]) -> None:
    """Raise UsageError for a state that cannot be converted to one of ``param``."""
    story = f"the optimizer's state[{param.name!r}][{name!r}]"
    if name == "step" and isinstance(value, numbers.Real):
        return
    if not isinstance(value, Tensor):
        raise UsageError(f"{story} is a {type(value).__name__}; it must be a tensor")
    fault = memory_fault(held(value))
    if fault is not None:
        raise UsageError(f"{story} {fault}; load the state anew")
    part, main, shape = held(value), held(param.main), shape_of(name, param)
    if name == "step":
        if value.numel() != 1 or value.dtype.is_complex:
            raise UsageError(f"{story} has shape {tuple(value.shape)} and dtype {value.dtype}; it must be one number")
        return
    # What lies in a segment is another parameter's, which may be updated on another device: no loop has moved it.
    if part.shape != shape or (part.device != main.device and _storage(value) not in segments):
        raise UsageError(
            f"{story} is {tuple(part.shape)} on {part.device}, its main param {tuple(param.main.shape)} on "
            f"{main.device}; load state of the same parameters, in the same order; where a loop moves state to the "
            "host between steps: let optimizer.offload() and reload() do it"
        )
    if not value.dtype.is_floating_point and not is_code(name, value):
        raise UsageError(f"{story} has dtype {value.dtype}; it must be floating point")


# Options of param groups


def rate(options: Mapping[str, Any]) -> float | Tensor:
    """Return the learning rate: a number, or a 0-d tensor of fp32 or fp64. Raises ArgumentError for what is neither."""
    value = options["lr"]
    if not isinstance(value, Tensor):
        return number(options, "lr")
    if value.numel() != 1 or value.dtype.is_complex:
        raise ArgumentError(
            f"lr of a param group must be a number, or a tensor of one, got a tensor of shape {tuple(value.shape)} and "
            f"dtype {value.dtype}"
        )
    if (fault := memory_fault(held(value))) is not None:
        raise ArgumentError(f"lr of a param group {fault}; assign a number, or a tensor that has its memory")
    value = value.detach().reshape(())
    return value.float() if value.dtype in HALF_DTYPES or not value.dtype.is_floating_point else value
