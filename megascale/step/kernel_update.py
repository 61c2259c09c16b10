"""The rules of :mod:`megascale.rules` on kernels, which read ``found_inf`` on the device."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
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
from megascale.main_params.update_unit import UpdateUnit
from megascale.rules import CODE_DTYPES, MOMENTS, Hyper, Rule
from megascale.rules.options import require_options
from megascale.step.compact_state import require_supported, start_of, with_scales
from megascale.step.decoded import DecodedParams, decoded_together, scratch_numel
from megascale.step.inner_step import InnerStep
from megascale.step.kernel_state import KernelState, rate
from megascale.step.torch_step import GeneralUpdate
from megascale.step.update import InnerUpdate, KernelCall, MarkWritten, OverflowFlags, PendingUpdate, Prepared
from megascale.utils.dtensors import held, to_local

_STORAGE: Callable[[Tensor], Any] = Tensor.untyped_storage
_ADDRESS: Callable[[Any], int] = torch.UntypedStorage.data_ptr


class _UnitOperands(NamedTuple):
    """The operands of a unit. Its main params and state never move: only their storages may, as into shared memory.

    Attributes:
        names: of the state.
        prepared: without gradients.
        storages: of main params and state. Held, so that no address is that of other memory.
        addresses: of these.
    """

    names: list[str]
    prepared: list[Prepared]
    storages: list[torch.UntypedStorage]
    addresses: list[int]


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
        self._prepared: WeakKeyDictionary[UpdateUnit, _UnitOperands] = WeakKeyDictionary()
        self._hypers: dict[int, _CachedHyper] = {}
        self._option_names = ("lr", *rule.numbers, *rule.flags)
        self._read_names = (*self._option_names, *rule.may_read)
        dtypes = {name: moment.dtype(getattr(config, moment.field)) for name, moment in MOMENTS.items()}
        require_supported(dtypes, optimizer, backend)
        self._dtypes = dtypes
        self._scratch: dict[torch.device, Tensor] = {}
        self._state = KernelState(optimizer, dtypes, rule.optional_state)

    @property
    def inner_step(self) -> InnerStep:
        """The wrapped optimizer's own step, which has one guard however many updates there are."""
        return self.general.inner_step

    @override
    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        require_options(options, self._option_names)
        self._state.create(params, self.required_state(options))

    @override
    def take_in_state(self) -> int:
        return self._state.take_in()

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
        hypers = []
        for pending, known in zip(updates, cached, strict=True):
            if known is None:
                values = [pending.options.get(name) for name in self._read_names]
                names = with_scales(self.required_state(pending.options), self._dtypes)
                known = _CachedHyper(values, self.hyper(pending.options), names)
                if all(map(_is_constant, values)):  # others can be written, and stay the same object
                    self._hypers[pending.unit.group] = known
            hypers.append(known)
        prepared = []
        for pending, operands, known in zip(updates, self._operands(updates, hypers), hypers, strict=True):
            prepared.append(replace(pending, call=KernelCall(operands, known.hyper)))
        return prepared

    @override
    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        if updates and updates[0].call is None:
            return self.general.apply(updates, decision, mark_written)
        overflow_flags: list[OverflowFlags] = []
        for pending in updates:
            prepared, hyper = pending.call or ([], None)
            for one in prepared:
                is_whole = len(one.indices) == len(pending.grads)
                grads = pending.grads if is_whole else pending.grads.pick(one.indices)
                if not grads.num_there:
                    continue
                params, operands, decoded = one.params, one.operands, one.decoded
                there = decision.to(operands.main[0].device)
                if decoded is not None and grads.missing:
                    decoded = decoded.pick(grads.there)
                if decoded is not None:
                    decoded.decode(self.backend)
                operands.grad = grads
                flags = self.run(one, hyper, there)
                operands.grad = ()  # cached operands must not keep gradients that the caller drops
                if decoded is not None:
                    params, flags = decoded.params, decoded.encode(self.backend, there)
                if one.rounds_to_fp16:  # else no flag is ever set, and nobody need count them
                    overflow_flags.append(OverflowFlags(params, flags))
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
        kinds = [(moment.name, self._dtypes[moment.name]) for moment in self.rule.moments]
        codes = [f"{name}={dtype}" for name, dtype in kinds if dtype in CODE_DTYPES]
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

    def _operands(self, updates: Sequence[PendingUpdate], hypers: Sequence[_CachedHyper]) -> list[list[Prepared]]:
        """Return the operands of each unit: those of an earlier step, while all of them serve; else new ones.

        Raises UsageError, before any value has changed, for state that an option needs and that was not loaded.
        """
        found = []
        for pending, known in zip(updates, hypers, strict=True):
            kept = self._prepared.get(pending.unit)
            if kept is None or kept.names != known.state_names or list(map(_ADDRESS, kept.storages)) != kept.addresses:
                break
            found.append(kept.prepared)
        else:
            return found
        # All are made anew: scratch memory that grows for one unit is another one's, too.
        units, names = [pending.unit for pending in updates], [known.state_names for known in hypers]
        for unit, needed in zip(units, names, strict=True):
            self._state.create(unit.params, needed, fills=False)
        for unit in [] if self.fuses_remainders else units:
            self._make_scratch([param for param in unit.params if param.remainder is not None])
        found = []
        for unit, needed in zip(units, names, strict=True):
            state = self._state.columns(unit.params, needed)
            copies = (param.memory for param in unit.params if param.is_copy)
            storages = map(_STORAGE, map(held, chain(copies, *state.values())))
            by_address = {storage.data_ptr(): storage for storage in storages}
            found.append(_prepare(unit.params, state, self._scratch, fuses=self.fuses_remainders))
            self._prepared[unit] = _UnitOperands(needed, found[-1], list(by_address.values()), list(by_address))
        return found

    def _make_scratch(self, held: Sequence[MainParam]) -> None:
        """Make memory that remainders can be decoded into; cached operands lie in the memory before, if any."""
        for device, indices in _by_device(held).items():
            params = [held[index] for index in indices]
            most = max(scratch_numel([params[at] for at in together]) for together in decoded_together(params))
            if device not in self._scratch or len(self._scratch[device]) < most:
                self._scratch[device] = torch.empty(most, dtype=torch.float32, device=device)
                self._prepared.clear()

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
        state: columns of the optimizer's state, one tensor for each of ``params``.
        scratch: memory to decode into.
        fuses: the update itself decodes remainders.
    """
    prepared = []
    for device, indices in _by_device(params).items():
        whole = [index for index in indices if params[index].remainder is None]
        cut = [index for index in indices if params[index].remainder is not None]
        prepared += [_prepared(params, chosen, state) for chosen in (whole, cut if fuses else []) if chosen]
        if not fuses:
            for places in decoded_together([params[index] for index in cut]):
                together = [cut[place] for place in places]
                decoded = DecodedParams([params[index] for index in together], scratch[device])
                prepared.append(_prepared(params, together, state, decoded))
    return prepared


def _prepared(
    params: Sequence[MainParam],
    indices: list[int],
    state: Mapping[str, Sequence[Tensor]],
    decoded: DecodedParams | None = None,
) -> Prepared:
    """Return the operands of the ``params`` at ``indices``: all are held as remainders, or none is."""
    chosen = [params[index] for index in indices]
    mains = decoded.mains if decoded is not None else [to_local(param.main) for param in chosen]
    # As for fp32 model params: a decoded main param is rounded when it is encoded.
    is_rounded = [param.is_copy and decoded is None for param in chosen]
    models = [param.rounded if own else main for param, main, own in zip(chosen, mains, is_rounded, strict=True)]
    listed: Any = TensorList  # parts of it need not be read again
    # By to_local() they are other tensors than those that programs see, and may point elsewhere.
    columns = {name: listed([to_local(column[index]) for index in indices]) for name, column in state.items()}
    operands = Operands(
        model=listed(models),
        main=listed(mains),
        step=columns.pop("step", []),
        state=columns,
        start=[start_of(param) for param in chosen] if any(map(is_scale, state)) else [],
    )
    if decoded is None and chosen[0].remainder is not None:
        operands.remainder = [to_local(param.memory) for param in chosen]
    rounds_to_fp16 = any(param.is_copy and param.model.dtype == torch.float16 for param in chosen)
    return Prepared(chosen, indices, operands, rounds_to_fp16, decoded)
