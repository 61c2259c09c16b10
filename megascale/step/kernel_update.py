"""The rules of :mod:`megascale.rules` on kernels, which read ``found_inf`` on the device."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from typing_extensions import override

from megascale.config import StepConfig
from megascale.errors import UsageError
from megascale.kernels import (
    Backend,
    Decision,
    Operands,
    ReferenceBackend,
    TensorList,
)
from megascale.kernels.compact_moments import is_scale
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import MOST_PARTS, UpdateUnit
from megascale.rules import CODE_DTYPES, MOMENTS, Hyper, Rule
from megascale.rules.options import require_options
from megascale.step.compact_state import require_supported, start_of, with_scales
from megascale.step.decoded import DecodedParams, decoded_together, scratch_numel
from megascale.step.inner_step import InnerStep
from megascale.step.kernel_state import KernelState, StateColumns, rate
from megascale.step.torch_step import GeneralUpdate
from megascale.step.update import InnerUpdate, KernelCall, MarkWritten, OverflowFlags, PendingUpdate, Prepared
from megascale.utils.dtensors import to_local


class _CachedOperands(NamedTuple):
    """A unit's cached operands, and the state tensors that they were built from.

    Attributes:
        params: of the unit: all but those that had neither a gradient nor whole state, by their index.
        parts: operands of some of them, for the newest steps in which the others had no gradient, by their indices.
    """

    params: dict[int, MainParam]
    state: StateColumns
    prepared: list[Prepared]
    parts: dict[tuple[int, ...], list[Prepared]]

    def of(self, pending: PendingUpdate) -> list[Prepared] | None:
        """Return the operands of the parameters that have a gradient; None if one of them is not here."""
        are_all = len(self.params) == len(pending.whole.params)
        if pending.indices is None:
            return self.prepared if are_all else None
        key = tuple(pending.indices)
        found = self.parts.pop(key, None)
        if found is None:
            if not are_all and not self.params.keys() >= set(key):
                return None
            place_of = {index: place for place, index in enumerate(key)}
            places = [place_of.get(index) for index in self.params]  # in the part, of each parameter here
            found = []
            for one in self.prepared:
                pairs = [(at, place) for at, index in enumerate(one.indices) if (place := places[index]) is not None]
                if pairs:
                    found.append(one.pick([at for at, _ in pairs], [place for _, place in pairs]))
        self.parts[key] = found  # the newest is last
        if len(self.parts) > MOST_PARTS:
            del self.parts[next(iter(self.parts))]
        return found


class _CachedHyper(NamedTuple):
    """A group's hyperparameters and the names of its state, and the values of the options that they were made of."""

    values: list[Any]
    hyper: Any
    state_names: list[str]


class KernelUpdate(InnerUpdate):
    """Runs an optimizer's rule: state made at once, one kernel call per unit and device.

    With step hooks, or options that the rule's kernels cannot run, the optimizer's own ``step()`` runs instead.

    ``inner_step``: of another one, of the same optimizer, for parameters whose memory is elsewhere.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        config: StepConfig,
        rule: Rule,
        inner_step: InnerStep | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.backend = backend
        self.rule = rule
        self._kernel = rule.kernel or ""
        is_own = hasattr(backend, self._kernel)
        self._kernels = backend if is_own else ReferenceBackend()
        # Else main params that are held as remainders are decoded for run().
        self.fuses_remainders = is_own and backend.fuses_remainders
        self.general = GeneralUpdate(optimizer, backend, inner_step)
        self._entries: list[dict[str, Any]] = []
        self._prepared: WeakKeyDictionary[UpdateUnit, _CachedOperands] = WeakKeyDictionary()
        self._hypers: dict[int, _CachedHyper] = {}
        self._option_names = ("lr", *rule.numbers, *rule.flags)
        self._read_names = (*self._option_names, *rule.may_read)
        dtypes = {name: moment.dtype(getattr(config, moment.field)) for name, moment in MOMENTS.items()}
        require_supported(dtypes, optimizer, backend)
        self._dtypes = dtypes
        self._scratch: dict[torch.device, Tensor] = {}
        self._state = KernelState(optimizer, dtypes)

    @property
    def inner_step(self) -> InnerStep:
        """The wrapped optimizer's own step, which has one guard however many updates there are."""
        return self.general.inner_step

    @override
    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        require_options(options, self._option_names)
        self._state.create(params, self.required_state(options))

    @override
    def release_scratch(self) -> None:
        self._prepared.clear()
        self._scratch.clear()

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        is_obstructed, cached = self.general.inner_step.is_hooked, list[_CachedHyper | None]()
        for pending in updates:
            known = self._hypers.get(pending.unit.group)
            # Hyperparameters serve while the options are the same objects as when they were read.
            if known is None or not all(map(is_, known.values, map(pending.options.get, self._read_names))):
                known = None
                require_options(pending.options, self._option_names)
                is_obstructed = is_obstructed or self.rule.obstacle(pending.options) is not None
            cached.append(known)
        if is_obstructed:
            self._require_readable(updates)
            return self.general.prepare(updates)
        entries = self.optimizer.state
        # Cached operands are those of state dicts that somebody may have replaced.
        if len(entries) != len(self._entries) or not all(map(is_, entries.values(), self._entries)):
            self._entries = list(entries.values())
            self._prepared.clear()
        if not self.fuses_remainders:
            self._make_scratch(updates)
        hypers = []
        for pending, known in zip(updates, cached, strict=True):
            if known is None:
                values = [pending.options.get(name) for name in self._read_names]
                names = with_scales(self.required_state(pending.options), self._dtypes)
                known = _CachedHyper(values, self.hyper(pending.options), names)
                if all(map(_is_constant, values)):  # others can be written, and stay the same object
                    self._hypers[pending.unit.group] = known
            hypers.append(known)
        operands = self._operands(updates, hypers)
        return [
            replace(pending, call=KernelCall(prepared, known.hyper))
            for pending, prepared, known in zip(updates, operands, hypers, strict=True)
        ]

    @override
    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        if updates and updates[0].call is None:
            return self.general.apply(updates, decision, mark_written)
        overflow_flags: list[OverflowFlags] = []
        place = decision.found_inf.device
        for pending in updates:
            prepared, hyper = pending.call or ([], None)
            for one in prepared:
                operands, device = one.operands, one.operands.main[0].device
                whole = len(one.indices) == len(pending.unit.params)
                operands.grad = pending.grads if whole else [pending.grads[index] for index in one.indices]
                there = decision if device == place else decision.to(device)
                if one.decoded is not None:
                    one.decoded.decode(self.backend)
                flags = self.run(one, hyper, there)
                if one.decoded is not None:
                    flags = one.decoded.encode(self.backend, there)
                operands.grad = ()  # cached operands must not keep gradients that the caller drops
                overflow_flags += one.flagged(flags)
            mark_written(pending.unit)
        # Tells an LR scheduler that was built on the inner optimizer that a step was taken.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return overflow_flags

    @override
    def check_options(self, options: dict[str, Any]) -> None:
        require_options(options, self._option_names)
        if self.rule.obstacle(options) is None:
            self.hyper(options)
        else:
            self.general.check_options(options)
        self.required_state(options)

    @override
    def readable_state(self, name: str, state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """Return a copy of the dict: :meth:`create_states` converts its tensors."""
        return dict(state)

    @override
    def required_state(self, options: dict[str, Any]) -> list[str]:
        names = self.rule.state_names(options)
        return [*names, "step"] if self.rule.counts_steps(options) else names

    @override
    def update_signature(self) -> str:
        if self.inner_step.is_hooked or any(map(self.rule.obstacle, self.optimizer.param_groups)):
            return self.general.update_signature()
        return f"{type(self.optimizer).__name__}, backend {self.backend.name}"

    @override
    def why_not_capturable(self) -> str | None:
        if self.inner_step.is_hooked:
            return f"{type(self.optimizer).__name__} has step hooks, which the host must call: remove them"
        obstacle = next(filter(None, map(self.rule.obstacle, self.optimizer.param_groups)), None)
        return None if obstacle is None else f"{type(self.optimizer).__name__} has {obstacle}"

    def _require_readable(self, updates: Sequence[PendingUpdate]) -> None:
        """Raise UsageError if the optimizer's own step() is to run on moments held as codes."""
        held = [(moment.name, self._dtypes[moment.name]) for moment in self.rule.moments]
        codes = [f"{name}={dtype}" for name, dtype in held if dtype in CODE_DTYPES]
        if codes:
            obstacles = [self.rule.obstacle(pending.options) for pending in updates]
            why = next(filter(None, obstacles), "step hooks: remove them")
            raise UsageError(
                f"{type(self.optimizer).__name__} has {why}, or keep the moments in torch.float32; otherwise its own "
                f"step() must run, which cannot read {', '.join(codes)}"
            )

    def hyper(self, options: dict[str, Any]) -> Hyper:
        """Return the hyperparameters. Raises ArgumentError for an option of a wrong type, naming it."""
        return self.rule.hyper(options, rate(options), type(self.optimizer))

    def _make_scratch(self, updates: Sequence[PendingUpdate]) -> None:
        """Make memory that remainders can be decoded into; cached operands lie in the memory before, if any."""
        needed: dict[torch.device, int] = {}
        for pending in updates:
            if pending.whole in self._prepared:
                continue
            held = [param for param in pending.whole.params if param.remainder is not None]
            for device, params in _by_device(held).items():
                chosen = [held[index] for index in params]
                most = max(scratch_numel([chosen[i] for i in indices]) for indices in decoded_together(chosen))
                needed[device] = max(most, needed.get(device, 0))
        for device, numel in needed.items():
            if device not in self._scratch or len(self._scratch[device]) < numel:
                self._scratch[device] = torch.empty(numel, dtype=torch.float32, device=device)
                self._prepared.clear()

    def _operands(self, updates: Sequence[PendingUpdate], hypers: Sequence[_CachedHyper]) -> list[list[Prepared]]:
        """Return operands by unit and device, without gradients: the cached ones, while all of them is the same.

        Where that of one unit is made anew, all units are looked at: state may be shared between them. Raises
        UsageError, before anything has changed, for state that shares memory.
        """
        kept: list[list[Prepared]] = []
        for pending, known in zip(updates, hypers, strict=True):
            one = self._cached(pending, known.state_names)
            if one is not None:
                kept.append(one)
        return kept if len(kept) == len(updates) else self._new_operands(updates, [one.state_names for one in hypers])

    def _cached(self, pending: PendingUpdate, names: list[str]) -> list[Prepared] | None:
        """Return operands that were made in an earlier step; None if a tensor is another one by now."""
        kept = self._prepared.get(pending.whole)
        return kept.of(pending) if kept is not None and kept.state.hold(names) else None

    def _new_operands(self, updates: Sequence[PendingUpdate], names: Sequence[list[str]]) -> list[list[Prepared]]:
        """Return the operands of all units, made anew where those of an earlier step do not serve.

        Parameters without a gradient are among those of their unit if their state is whole: no step creates any for
        them, or complains of it.
        """
        units: list[tuple[list[MainParam], list[str]]] = []
        grads: list[Sequence[Tensor]] = []
        chosen: list[dict[int, MainParam]] = []
        for pending, known in zip(updates, names, strict=True):
            place_of = None if pending.indices is None else {index: at for at, index in enumerate(pending.indices)}
            params, theirs = {}, []
            for index, param in enumerate(pending.whole.params):
                place = index if place_of is None else place_of.get(index)
                if place is not None or self._state.is_whole(param, known):
                    params[index] = param
                    theirs.append(param.part if place is None else pending.grads[place])
            chosen.append(params)
            grads.append(theirs)
            units.append((list(params.values()), known))
        # State must not reach into what this step does not update either: main params of these and of earlier steps.
        busy = {id(param) for params, _ in units for param in params}
        every = dict.fromkeys([*self._prepared, *(pending.whole for pending in updates)])
        idle = [param for unit in every for param in unit.params if id(param) not in busy]
        self._state.require_apart(units, grads, idle)
        for pending, (listed, known) in zip(updates, units, strict=True):
            if self._cached(pending, known) is None:
                self._state.complete(listed, known, self.rule.optional_state)
        self._state.separate(units)
        found = []
        for pending, params, (listed, known) in zip(updates, chosen, units, strict=True):
            kept = self._cached(pending, known)
            if kept is None:
                state = self._state.columns(listed, known)
                prepared = _prepare(listed, state.by_name, self._scratch, fuses=self.fuses_remainders)
                made = self._prepared[pending.whole] = _CachedOperands(params, state, prepared, {})
                kept = made.of(pending)
            found.append(kept or [])
        return found

    def run(self, prepared: Prepared, hyper: Any, decision: Decision) -> Tensor:
        """Call the kernel and return its overflow flags, one per parameter."""
        flags: Tensor = getattr(self._kernels, self._kernel)(prepared.operands, hyper, decision)
        return flags


def _is_constant(value: Any) -> bool:
    """Whether a value of an option stays what it is as long as it is the same object."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or type(value) in (float, int, bool, str)


def _by_device(params: Sequence[MainParam]) -> dict[torch.device, list[int]]:
    """Return the indices of parameters by the device of their main params."""
    found: defaultdict[torch.device, list[int]] = defaultdict(list)
    for index, param in enumerate(params):
        found[to_local(param.memory).device].append(index)
    return found


def _prepare(
    params: Sequence[MainParam],
    state: Mapping[str, Sequence[Tensor]],
    scratch: Mapping[torch.device, Tensor],
    *,
    fuses: bool,
) -> list[Prepared]:
    """Split a unit by device, and what is held as remainders into what is decoded together.

    Args:
        state: columns of the optimizer's state.
        scratch: memory to decode into.
        fuses: the update itself decodes remainders.
    """
    prepared = []
    for device, indices in _by_device(params).items():
        whole = [index for index in indices if params[index].remainder is None]
        held = [index for index in indices if params[index].remainder is not None]
        prepared += [_prepared(params, chosen, state) for chosen in (whole, held if fuses else []) if chosen]
        if not fuses:
            for places in decoded_together([params[index] for index in held]):
                together = [held[place] for place in places]
                decoded = DecodedParams([params[index] for index in together], scratch[device])
                prepared.append(_prepared(params, together, state, decoded))
    return prepared


def _prepared(
    params: Sequence[MainParam],
    indices: list[int],
    state: Mapping[str, Sequence[Tensor]],
    decoded: DecodedParams | None = None,
) -> Prepared:
    """Return the operands of the parameters at ``indices``: all are held as remainders, or none is."""
    chosen = [params[index] for index in indices]
    mains = decoded.mains if decoded is not None else [to_local(param.main) for param in chosen]
    # As for fp32 model params: a decoded main param is rounded when it is encoded.
    is_rounded = [param.is_copy and decoded is None for param in chosen]
    models = [param.rounded if own else main for param, main, own in zip(chosen, mains, is_rounded, strict=True)]
    listed: Any = TensorList  # parts of it need not be read again
    operands = Operands(
        model=listed(models),
        main=listed(mains),
        state={
            name: listed([to_local(column[i]) for i in indices]) for name, column in state.items() if name != "step"
        },
        start=[start_of(param) for param in chosen] if any(map(is_scale, state)) else [],
        step=listed([state["step"][index] for index in indices]) if "step" in state else [],
    )
    if decoded is None and chosen[0].remainder is not None:
        operands.remainder = [to_local(param.memory) for param in chosen]
    rounds_to_fp16 = any(param.is_copy and param.model.dtype == torch.float16 for param in chosen)
    return Prepared(chosen, indices, operands, rounds_to_fp16, decoded)
