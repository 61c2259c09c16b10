"""The rules of :mod:`megascale.rules` on kernels, which read ``found_inf`` on the device."""

from collections.abc import Callable, Sequence
from itertools import chain, groupby
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from megascale.config import StepConfig
from megascale.errors import InnerStepError, MegascaleError, UsageError
from megascale.kernels import Backend, Decision, Operands
from megascale.kernels.compact_moments import is_scale
from megascale.main_params.main_param import MainParam
from megascale.main_params.segments import side_by_side
from megascale.main_params.update_unit import UpdateUnit
from megascale.rules import MOMENTS, Hyper, Rule
from megascale.rules.options import require_options
from megascale.step.compact_state import require_supported, start_of, with_scales
from megascale.step.kernel_state import KernelState, rate
from megascale.step.torch_step import GeneralUpdate
from megascale.step.update import Kernel, KernelCall, KernelCalls, MarkWritten, OverflowFlags, PendingUpdate
from megascale.utils.dtensors import held, to_local
from megascale.utils.supported_torch import explained

_STORAGE: Callable[[Tensor], Any] = Tensor.untyped_storage
_ADDRESS: Callable[[Any], int] = torch.UntypedStorage.data_ptr


class _Run(NamedTuple):
    """Neighbouring param groups of a unit that one call updates.

    Attributes:
        part: of the unit's main params, theirs.
        names: of their state.
        sizes: how many main params each group has.
        hypers: of each group.
    """

    part: slice
    names: list[str]
    sizes: list[int]
    hypers: list[Hyper]


class KernelUpdate(GeneralUpdate):
    """Runs an optimizer's rule: state made at once, and as few kernel calls per unit as its backend lets.

    With step hooks, or options that the rule's kernels cannot run, the optimizer's own ``step()`` runs instead.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, config: StepConfig, rule: Rule) -> None:
        super().__init__(optimizer, backend)
        self.rule = rule
        self._option_names = ("lr", *rule.numbers, *rule.flags)
        self._read_names = (*self._option_names, *rule.may_read)
        dtypes = {name: moment.dtype(getattr(config, moment.field)) for name, moment in MOMENTS.items()}
        require_supported(dtypes, optimizer, backend)
        self._dtypes = dtypes
        self._state = KernelState(optimizer, dtypes, rule.optional_state)

    def backend_of(self, unit: UpdateUnit) -> Backend:
        """Return the backend that updates a unit."""
        return self.backend

    def kernel_of(self, unit: UpdateUnit, part: slice) -> Kernel:
        """Return what updates ``part`` of a unit's main params: it must not refer to this object."""
        kernel: Kernel = getattr(self.backend_of(unit), self.rule.kernel or "")
        return kernel

    @override
    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        require_options(options, self._option_names)
        self._state.create(params, self.required_state(options))

    @override
    def take_in_state(self) -> bool:
        return self._state.take_in()

    @override
    def release_memory(self, units: Sequence[UpdateUnit]) -> None:
        for unit in units:
            unit.calls = None

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        # All units first: an obstacle of one sends all of them to the optimizer's own step().
        obstacle = "step hooks: remove them" if self.is_hooked else None
        changed: list[list[Any] | None] = []  # the values of a unit's options, where they are not those of before
        for pending in updates:
            values: list[Any] = []
            for options in pending.options:
                values += map(options.get, self._read_names)
            kept: KernelCalls | None = pending.unit.calls
            # Hyperparameters are valid as long as every option is the same object as when they were made.
            if kept is not None and all(map(is_, kept.values, values)):
                changed.append(None)
                continue
            for options in pending.options:
                require_options(options, self._option_names)
                obstacle = self.rule.obstacle(options) or obstacle
            changed.append(values)
        if obstacle is not None:
            return self.prepare_own_step(updates, obstacle)
        return [
            PendingUpdate(one.options, one.unit, one.grads, self._calls_of(one, values))
            for one, values in zip(updates, changed, strict=True)
        ]

    def prepare_own_step(self, updates: Sequence[PendingUpdate], why: str) -> list[PendingUpdate]:
        """Return the updates ready for the optimizer's own ``step()``, which runs because it has ``why``.

        Raises UsageError for moments that are not fp32, with which it does not compute.
        """
        dtypes = [(moment.name, self._dtypes[moment.name]) for moment in self.rule.moments]
        if narrow := [f"{name}={dtype}" for name, dtype in dtypes if dtype != torch.float32]:
            raise UsageError(
                f"{type(self.optimizer).__name__} has {why}, or keep the moments in torch.float32; otherwise its "
                f"own step() must run, which cannot compute with {', '.join(narrow)}"
            )
        return super().prepare(updates)

    @override
    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        overflow_flags: list[OverflowFlags] = []
        failure: Exception | None = None
        for pending in updates:
            if pending.calls is None:  # as in all updates: the optimizer's own step() is to run
                return super().apply(updates, decision, mark_written)
            try:
                overflow_flags += pending.calls.run(pending.grads, decision)
            except Exception as caught:  # such as no memory: other ranks wait for what mark_written() sends
                error = explained(caught)
                if isinstance(error, MegascaleError):  # of a graph's capture, or of this torch: told at once
                    raise error from error.__cause__
                failure = failure or error
            mark_written(pending.unit)  # last of the unit: it may send away what was just written
        if failure is not None:
            raise InnerStepError(
                f"the update of {type(self.optimizer).__name__} raised {type(failure).__name__}: {failure}; some main "
                "params may be updated and others not: mend the cause, then load a checkpoint or a state dict"
            ) from failure
        # Tells an LR scheduler that was built on the inner optimizer that a step was taken.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return overflow_flags

    @override
    def check_options(self, options: dict[str, Any]) -> None:
        require_options(options, self._option_names)
        if self.rule.obstacle(options) is None:
            self.hyper(options)
        else:
            super().check_options(options)
        self.required_state(options)

    @override
    def load_state(self, param: MainParam, state: dict[str, Any]) -> dict[str, Any]:
        return self._state.load(param, state)

    @override
    def required_state(self, options: dict[str, Any]) -> list[str]:
        names = self.rule.state_names(options)
        return [*names, "step"] if self.rule.counts_steps(options) else names

    @override
    def update_signature(self) -> str:
        if self.is_hooked or any(map(self.rule.obstacle, self.optimizer.param_groups)):
            return super().update_signature()
        return f"{type(self.optimizer).__name__}, backend {self.backend.name}"

    @override
    def why_not_capturable(self) -> str | None:
        if self.is_hooked:
            return f"{type(self.optimizer).__name__} has step hooks, which the host must call: remove them"
        obstacle = next(filter(None, map(self.rule.obstacle, self.optimizer.param_groups)), None)
        return None if obstacle is None else f"{type(self.optimizer).__name__} has {obstacle}"

    def hyper(self, options: dict[str, Any]) -> Hyper:
        """Return the hyperparameters. Raises ArgumentError for an option of a wrong type, naming it."""
        return self.rule.hyper(options, rate(options), type(self.optimizer))

    def _calls_of(self, pending: PendingUpdate, values: list[Any] | None) -> KernelCalls:
        """Return what updates a unit: what has updated it before, if state and options are as they were.

        ``values``: of the options; None: they are as they were.

        Raises UsageError, before any value has changed, for state that an option needs and that was not loaded.
        """
        unit, backend = pending.unit, self.backend_of(pending.unit)
        kept: KernelCalls | None = unit.calls
        # Nobody replaces main params and state, but share_memory_() may move the storage of one.
        if kept is not None and list(map(_ADDRESS, kept.storages.values())) != list(kept.storages):
            kept = None
        if kept is not None and values is None:
            return kept
        if values is None or not all(map(_is_constant, values)):
            values = [object()]  # a tensor or a list may be written in place: nothing is the same in the next step
        # One call updates neighbouring param groups that the kernel can take together.
        groups = []
        for options, params in zip(pending.options, unit.groups.values(), strict=True):
            hyper, names = self.hyper(options), with_scales(self.required_state(options), self._dtypes)
            groups.append((names, backend.kind_of(hyper), hyper, len(params)))
        runs, start = list[_Run](), 0
        for (names, _), together in groupby(groups, lambda group: group[:2]):
            *_, hypers, sizes = map(list, zip(*together, strict=True))
            stop = start + sum(sizes)
            runs.append(_Run(slice(start, stop), names, sizes, hypers))
            start = stop
        if kept is None or [(one.part, one.names) for one in kept.calls] != [(one.part, one.names) for one in runs]:
            kept = self._new_calls(unit, runs)
        calls = [call._replace(hypers=run.hypers) for call, run in zip(kept.calls, runs, strict=True)]
        unit.calls = kept._replace(values=values, calls=calls)
        return unit.calls

    def _new_calls(self, unit: UpdateUnit, runs: Sequence[_Run]) -> KernelCalls:
        """Return new calls, one for each run, which lack their hyperparameters and the values of options."""
        calls, counts, memory = list[KernelCall](), list[Tensor](), [one.memory for one in unit.params if one.is_copy]
        for part, names, sizes, _ in runs:
            params = unit.params[part]
            self._state.create([*params, *unit.elsewhere], names, fills=False)
            state = self._state.columns(params, names)
            counts += self._state.columns(unit.counted, ["step"])["step"] if "step" in names else []
            memory += chain.from_iterable(state.values())
            # By to_local() DTensors' are other tensors than those that programs see, and may point elsewhere.
            mains = [to_local(param.main) for param in params]
            columns = {name: [to_local(tensor) for tensor in column] for name, column in state.items()}
            operands = Operands(
                model=[param.rounded if param.is_copy else main for param, main in zip(params, mains, strict=True)],
                main=mains,
                step=columns.pop("step", []),
                state=columns,
                start=[start_of(param) for param in params] if any(map(is_scale, state)) else [],
                remainder=[to_local(param.remainder) for param in params if param.remainder is not None],
                groups=sizes,
            )
            may_overflow = any(param.is_copy and param.model.dtype == torch.float16 for param in params)
            calls.append(KernelCall(part, names, self.kernel_of(unit, part), operands, params if may_overflow else []))
        # Kept alive, so that no other tensor gets an address that is compared.
        storages = {storage.data_ptr(): storage for storage in map(_STORAGE, map(held, [*memory, *counts]))}
        return KernelCalls(calls, side_by_side(counts), storages)


def _is_constant(value: Any) -> bool:
    """Whether a value of an option stays what it is as long as it is the same object."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or type(value) in (float, int, bool, str)
