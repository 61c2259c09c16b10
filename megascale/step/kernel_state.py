"""The optimizer state that our kernels read and write: created as torch creates it, checked before each step."""

import numbers
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.errors import ArgumentError, UsageError
from megascale.kernels import (
    MemoryRecord,
    memory_fault,
    overlapping,
    sharing,
    tensor_fault,
)
from megascale.kernels.compact_moments import is_scale
from megascale.main_params.group_scales import scales_like
from megascale.main_params.main_param import MainParam
from megascale.main_params.slab import SLAB, Slabs
from megascale.rules import CODE_DTYPES
from megascale.rules.options import number
from megascale.step.compact_state import (
    convert_,
    holds_codes,
    is_code,
    require_holdable,
    require_uncast,
    shape_of,
    with_scales,
)
from megascale.step.torch_states import state_of
from megascale.utils.dtensors import held, to_local
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.transfer import to_device_async


class StateColumns(NamedTuple):
    """The state tensors of some parameters. Holding them keeps their memory from being reused.

    Attributes:
        entries: per parameter, its dict in the optimizer's ``state``.
        names: of the state that is read, ``step`` last.
        by_name: per name, one tensor per parameter.
        values: all that the entries hold, in their order.
        memory: addresses and layouts at the time of the check, of all tensors but model params.
    """

    entries: list[dict[str, Any]]
    names: list[str]
    by_name: dict[str, list[Tensor]]
    values: list[Any]
    memory: MemoryRecord

    def hold(self, names: list[str]) -> bool:
        """Whether every entry still has these same tensors, at the same addresses and with the same layouts."""
        if self.names != names:
            return False
        are_same = sum(map(len, self.entries)) == len(self.values) and all(map(is_, _values(self.entries), self.values))
        return are_same and self.memory.holds()


class KernelState:
    """Creates and checks the state of one torch optimizer for our kernels, in torch's own layout.

    Args:
        optimizer: its ``state`` may be replaced or cleared at any time.
        dtypes: of the state of fp32 main params, by the state's name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtypes: Mapping[str, torch.dtype]) -> None:
        self._optimizer = optimizer
        self._dtypes = dict(dtypes)
        self._is_compact = any(dtype in CODE_DTYPES for dtype in dtypes.values())

    def create(self, params: Sequence[MainParam], names: Sequence[str]) -> None:
        """Create missing state of ``params`` and convert what exists, in the configured dtypes; values are kept.

        New state is zeros, as in torch; also a momentum buffer, whose first gradient is not dampened while ``step`` is
        0. State of an fp64 parameter is fp64.

        Raises UsageError, before anything has changed, for existing state that does not fit.
        """
        names = with_scales(names, self._dtypes)
        entries = [self._entry(param) for param in params]
        # All are checked before the first one changes: a refusal leaves the state as it was.
        for entry, param in zip(entries, params, strict=True):
            if self._is_compact:
                require_holdable(param)
            require_uncast(entry, param)
            for name in {*names, *filter(is_scale, entry)}:
                if entry.get(name) is not None:
                    _check(name, entry[name], param)
        # Before the moments: a momentum buffer that is there already decides where its count begins, and the dither of
        # codes depends on the count.
        if "step" in names:
            self._create_steps(entries, params)
        slabs = Slabs(param.main for param in params)
        for entry, param in zip(entries, params, strict=True):
            if self._is_compact or holds_codes(entry):
                convert_(entry, self._dtypes, param)
            for name in names:
                if name == "step":
                    continue
                dtype = self._dtype(name, param)
                if is_scale(name):
                    if entry.get(name) is None:
                        scales = torch.zeros(shape_of(name, param), dtype=dtype, device=param.main.device)
                        entry[name] = scales_like(param.main, scales)
                    elif not self._fits(name, entry[name], param):
                        entry[name] = entry[name].to(dtype).contiguous()
                elif entry.get(name) is None:
                    entry[name] = slabs.zeros(param.main, dtype, name)
                else:
                    entry[name] = slabs.moved_in(entry[name].to(dtype), param.main, name)

    def complete(self, params: Sequence[MainParam], names: Sequence[str], optional: Collection[str]) -> None:
        """Check the state of ``params``, and create what is missing, as at a first step.

        Args:
            params: all of one param group.
            names: of the state that the group's options need.
            optional: names that an existing state may lack, as an option may have been switched on later.

        Raises UsageError, before anything has changed, naming the parameter whose state does not fit.
        """
        wanting: list[MainParam] = []
        for param in params:
            entry = self._entry(param)
            require_uncast(entry, param)
            lacks = [name for name in names if entry.get(name) is None]
            may_lack = {*optional, *filter(is_scale, names)}
            if entry and not set(lacks) <= may_lack:
                raise UsageError(
                    f"the optimizer's state of {param.name!r} has {sorted(map(str, entry))} and lacks {lacks}; load "
                    "state that is whole, or clear it, so that the parameter starts anew"
                )
            if lacks or any(not self._fits(name, entry[name], param) for name in names):
                wanting.append(param)
        if wanting:
            self.create(wanting, names)

    def is_whole(self, param: MainParam, names: Sequence[str]) -> bool:
        """Whether all state of these names is there, as kernels can use it."""
        entry = self._optimizer.state.get(param.model)
        try:
            return isinstance(entry, dict) and all(
                entry.get(name) is not None and self._fits(name, entry[name], param) for name in names
            )
        except UsageError:
            return False

    def require_apart(
        self,
        units: Sequence[tuple[Sequence[MainParam], Sequence[str]]],
        grads: Sequence[Sequence[Tensor]],
        idle: Sequence[MainParam],
    ) -> None:
        """Raise UsageError, naming both, for state that shares a byte with other state, a parameter or a gradient.

        An update would overwrite what another one reads. Nothing has changed. Only step counts may be one tensor:
        :meth:`separate` copies them.

        Args:
            units: all parameters that one step updates, each with the names of its state.
            grads: of each unit, in its order.
            idle: main params that the step does not update, as far as they are known.
        """
        state, others = [], []
        for (params, names), theirs in zip(units, grads, strict=True):
            entries = [state_of(self._optimizer, param) for param in params]
            called = [param.name for param in params]
            state += [_state_memory(called, entries, name) for name in names]
            others += _param_memory(params)
            # By index: iterating would keep the gradients alive.
            others.append(_Memory(_GRADIENT, "", called, [theirs[at] for at in range(len(params))]))
        busy = {id(param.model) for params, _ in units for param in params}
        pair = _shared(state, [*others, *self._idle_memory(busy, idle)])
        if pair is not None:
            (own, name), (other, other_name) = pair
            owner = next(param for params, _ in units for param in params if param.name == name)
            raise UsageError(
                f"{own.of(name)} shares memory with {other.of(other_name)}, so that one update would overwrite what "
                f"another needs; for this parameter p: {self._remedy(state_of(self._optimizer, owner), own.key)}"
            )

    def separate(self, units: Sequence[tuple[Sequence[MainParam], Sequence[str]]]) -> None:
        """Replace step counts that share memory, as one ``step`` for all parameters does, by copies.

        Args:
            units: all parameters that one step updates, each with the names of its state, which :meth:`complete` made
                whole.
        """
        entries = [self._entry(param) for unit, names in units if "step" in names for param in unit]
        counted = set(map(id, entries))
        others = [own for own in self._optimizer.state.values() if isinstance(own, dict) and id(own) not in counted]
        steps = [step for own in others if isinstance(step := own.get("step"), Tensor)]
        idle = [step for step in steps if _is_there(held(step))]
        for index in overlapping([held(tensor) for tensor in (*(entry["step"] for entry in entries), *idle)]):
            if index < len(entries):
                entries[index]["step"] = entries[index]["step"].clone()

    def columns(self, params: Sequence[MainParam], names: Sequence[str]) -> StateColumns:
        """Return the state of ``params``, which :meth:`require_apart` and :meth:`complete` have checked."""
        entries = [self._entry(param) for param in params]
        columns = {name: [entry[name] for entry in entries] for name in names}
        # Not model params: those are checked elsewhere, each step.
        mine = ((param.model, part) for param in params for part in (param.memory, param.shard))
        watched = [part for model, part in mine if part is not None and part is not model]
        parts = [held(tensor) for tensor in (*watched, *(tensor for column in columns.values() for tensor in column))]
        return StateColumns(entries, list(names), columns, list(_values(entries)), MemoryRecord(parts))

    def _remedy(self, entry: Mapping[str, Any], key: str) -> str:
        """Return the statement that gives a state memory of its own."""
        if sum(other is entry for other in self._optimizer.state.values()) > 1:
            return "state[p] = copy.deepcopy(state[p])"
        return f"state[p][{key!r}] = state[p][{key!r}].clone()"

    def _idle_memory(self, busy: Collection[int], idle: Sequence[MainParam]) -> "list[_Memory]":
        """Return the memory of listed parameters whose ids are not among ``busy``, without step counts."""
        listed = [(name, model) for name, model in named_in(self._optimizer.param_groups) if id(model) not in busy]
        if not listed:
            return []
        known = {id(param.model): param for param in idle}
        called = [known[id(model)].name if id(model) in known else name for name, model in listed]
        entries = [self._optimizer.state.get(model) for _, model in listed]
        dicts = [entry if isinstance(entry, dict) else {} for entry in entries]
        keys = {key for entry in dicts for key in entry if key in self._dtypes or is_scale(key)}
        return [
            _Memory(_DATA, "", called, [model for _, model in listed]),
            *_param_memory([known[id(model)] for _, model in listed if id(model) in known]),
            *(_state_memory(called, dicts, key) for key in keys),
        ]

    def _entry(self, param: MainParam) -> dict[str, Any]:
        state = self._optimizer.state
        if param.model not in state:
            state[param.model] = {}
        return state_of(self._optimizer, param)

    def _dtype(self, name: str, param: MainParam) -> torch.dtype:
        if is_scale(name):
            return torch.float32
        return param.main.dtype if param.main.dtype == torch.float64 else self._dtypes[name]

    def _fits(self, name: str, value: Any, param: MainParam) -> bool:
        """Return whether the kernels can use a state as it is."""
        _check(name, value, param)
        if not isinstance(value, Tensor):
            return False
        part = to_local(value)
        if name == "step":
            return value.shape == () and value.dtype == torch.float32 and value.device == to_local(param.main).device
        is_dense = part.is_contiguous() or not is_scale(name)  # kernels take scales in a row
        return value.dtype == self._dtype(name, param) and is_dense

    def _create_steps(self, entries: Sequence[dict[str, Any]], params: Sequence[MainParam]) -> None:
        steps = []
        for entry in entries:
            # An existing buffer has seen a gradient: torch dampens the next one.
            first = 1.0 if entry.get("momentum_buffer") is not None else 0.0
            step = first if entry.get("step") is None else entry["step"]
            if not isinstance(step, Tensor):
                step = torch.as_tensor(step, dtype=torch.float32, device="cpu")
            steps.append(step.detach().reshape(()).float())
        steps = _placed(steps, [to_local(param.main).device for param in params])
        slabs = Slabs(steps)
        for entry, step in zip(entries, steps, strict=True):
            entry["step"] = slabs.moved_in(step, step, "step")


def _values(entries: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, entries))


def _placed(numbers: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Return 0-d tensors, each on its device. Host tensors are copied together, into slabs."""
    placed = list(numbers)
    travelling: defaultdict[torch.device, list[int]] = defaultdict(list)
    for index, (count, device) in enumerate(zip(numbers, devices, strict=True)):
        if count.device.type == "cpu" and device.type != "cpu":
            travelling[device].append(index)
        else:
            placed[index] = count.to(device)
    for device, indices in travelling.items():
        for begin in range(0, len(indices), SLAB):
            run = indices[begin : begin + SLAB]
            arrived = to_device_async(torch.stack([numbers[index] for index in run]), device)
            for index, count in zip(run, arrived.unbind(), strict=True):
                placed[index] = count.data  # a version counter of its own
    return placed


def _check(name: str, value: Any, param: MainParam) -> None:
    """Raise UsageError for a state that cannot be converted to one of ``param``."""
    story = f"the optimizer's state[{param.name!r}][{name!r}]"
    if name == "step" and isinstance(value, numbers.Real):
        return
    if not isinstance(value, Tensor):
        raise UsageError(f"{story} is a {type(value).__name__}; it must be a tensor")
    fault = tensor_fault(held(value))
    if fault is not None:
        raise UsageError(f"{story} {fault}; or load the state anew")
    part, main, shape = to_local(value), to_local(param.main), shape_of(name, param)
    if name == "step":
        if value.numel() != 1 or value.dtype.is_complex:
            raise UsageError(f"{story} has shape {tuple(value.shape)} and dtype {value.dtype}; it must be one number")
        return
    if part.shape != shape or part.device != main.device:
        raise UsageError(
            f"{story} is {tuple(part.shape)} on {part.device}, its main param {tuple(main.shape)} on {main.device}; "
            "load state of the same parameters, in the same order; where a loop moves state to the host between steps: "
            "let optimizer.offload() and reload() do it"
        )
    if not value.dtype.is_floating_point and not is_code(name, value):
        raise UsageError(f"{story} has dtype {value.dtype}; it must be floating point")


_STATE = "the optimizer's state[{name!r}][{key!r}]"
_DATA = "the data of parameter {name!r}"
_MAIN = "the main param of {name!r}"
_GRADIENT = "the gradient of {name!r}"


class _Memory(NamedTuple):
    """Tensors of one kind, one for each of the parameters ``names``. ``story``: the kind; ``key``: of state."""

    story: str
    key: str
    names: Sequence[str]
    tensors: Sequence[Tensor]

    def of(self, name: str) -> str:
        """Return what a message calls the tensor of parameter ``name``."""
        return self.story.format(name=name, key=self.key)


def _state_memory(names: Sequence[str], entries: Sequence[Mapping[str, Any]], key: str) -> _Memory:
    """Return the tensors at ``key`` of the state of the parameters ``names``."""
    found = {at: entry[key] for at, entry in enumerate(entries) if isinstance(entry.get(key), Tensor)}
    return _Memory(_STATE, key, [names[at] for at in found], list(found.values()))


def _param_memory(params: Sequence[MainParam]) -> list[_Memory]:
    """Return model params, and what main params have memory of their own for."""
    copies = [param for param in params if param.is_copy]
    return [
        _Memory(_DATA, "", [param.name for param in params], [param.model for param in params]),
        _Memory(_MAIN, "", [param.name for param in copies], [param.memory for param in copies]),
    ]


def named_in(param_groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters with the names that their groups give them, else their positions."""
    position = 0
    for group in param_groups:
        names = group.get("param_names") or []
        for at, model in enumerate(group["params"]):
            yield names[at] if at < len(names) else str(position), model
            position += 1


def _shared(
    state: Sequence[_Memory], others: Sequence[_Memory]
) -> tuple[tuple[_Memory, str], tuple[_Memory, str]] | None:
    """Return state, and what it shares a byte with: earlier state, or one of ``others``. None if there is no such pair.
    Each with the name of its parameter.

    What has no memory, or too little, shares none: :func:`_check` refuses it. Step counts at one address are one.
    """
    memory = (*state, *others)
    parts = [list(map(held, one.tensors)) for one in memory]  # of a DTensor its own local tensor, no new view of it
    try:
        if not overlapping([part for some in parts for part in some]):
            return None
    except RuntimeError:  # a tensor has no address
        pass
    counts: set[int] = set()
    own: list[tuple[_Memory, str, Tensor]] = []
    theirs: list[tuple[_Memory, str, Tensor]] = []
    for index, (one, some) in enumerate(zip(memory, parts, strict=True)):
        for name, part in zip(one.names, some, strict=True):
            is_counted = one.key == "step" and _address(part) in counts
            if one.key == "step":
                counts.add(_address(part))
            if not is_counted and _is_there(part):
                (own if index < len(state) else theirs).append((one, name, part))
    pair = sharing([part for *_, part in own], [part for *_, part in theirs])
    if not pair:
        return None
    first, second = ((*own, *theirs)[index][:2] for index in pair)
    return (second, first) if pair[1] < len(own) else (first, second)


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _is_there(tensor: Tensor) -> bool:
    return memory_fault(tensor) is None


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
    fault = tensor_fault(value)
    if fault is not None:
        raise ArgumentError(f"lr of a param group {fault}; give it a number, or a tensor of one")
    value = value.detach().reshape(())
    return value.float() if value.dtype in HALF_DTYPES or not value.dtype.is_floating_point else value
