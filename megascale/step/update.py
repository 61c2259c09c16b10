"""How the wrapped optimizer's math reaches the main params: by our kernels, or through its own ``step()``.

Adam, AdamW, SGD and Lion run on our kernels, which obey `found_inf` on the device. Any other optimizer cannot, so the
host reads `found_inf` once and calls its ``step()`` where the step lands. Both keep the state in torch's own layout,
keyed by model param.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.config import OptimizerConfig
from megascale.errors import ArgumentError, UsageError
from megascale.kernels import (
    AdamHyper,
    Backend,
    Decision,
    LionHyper,
    Operands,
    SgdHyper,
    TensorList,
    memory_fault,
    new_tags,
    same_values,
)
from megascale.lion import Lion
from megascale.main_params.base import HALF_DTYPES, Batch, MainParam
from megascale.step.inner_step import InnerStep, without_grad
from megascale.step.kernel_state import KernelState, StateColumns, has_tensors, number, pair, rate
from megascale.step.torch_states import widen, with_tensor_counts
from megascale.utils.dtensors import dtensor_like, local

CLOSURE_OPTIMIZERS = (torch.optim.LBFGS,)
SPARSE_OPTIMIZERS = (torch.optim.SparseAdam,)


@dataclass(frozen=True)
class GroupUpdate:
    """A batch, all of which have gradients: its param group's options, and the gradients, local, in the same order.

    ``call``: what :meth:`InnerUpdate.prepare` made ready for it.
    """

    options: dict[str, Any]
    batch: Batch
    grads: TensorList
    call: "KernelCall | None" = None

    @property
    def params(self) -> list[MainParam]:
        """The main params."""
        return self.batch.params


@dataclass(frozen=True)
class Rounded:
    """Main params of one device and, shape [len(params)], whether the rounding of each into fp16 was not finite."""

    params: list[MainParam]
    overflowed: Tensor


class Prepared(NamedTuple):
    """Main params of one device, their places in the batch, and their operands, but for the gradients."""

    params: list[MainParam]
    indices: list[int]
    operands: Operands


Hyper = AdamHyper | SgdHyper | LionHyper


class KernelCall(NamedTuple):
    """One call of a kernel for each device that a batch is on, and the hyperparameters of all."""

    prepared: list[Prepared]
    hyper: Hyper


class _Kept(NamedTuple):
    """What was worked out for a batch with its state."""

    state: StateColumns
    prepared: list[Prepared]


Publish = Callable[[Batch, NDArray[np.int64] | None], None]
"""Takes a batch and, where they are known, the versions of the local parts of its model params."""


class InnerUpdate(Protocol):
    """Applies one decision to all groups."""

    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        """Make the state of parameters of one group that have none."""

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """Return the keys without which a saved state of a parameter is not whole."""

    def readable_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a loaded state of the parameter ``name`` in the types that the update reads. Raises StateDictError."""

    def why_not_capturable(self) -> str | None:
        """Return why updates cannot be part of a device's graph; None where they can."""

    def prepare(self, groups: Sequence[GroupUpdate]) -> list[GroupUpdate]:
        """Return the groups ready for :meth:`apply`, which follows before anything else can happen to their tensors.

        Looks at everything that the update will read or write but the gradients and model params. Raises a
        MegascaleError for what cannot be updated, naming it: no value has changed.
        """

    def apply(self, groups: Sequence[GroupUpdate], decision: Decision, publish: Publish) -> list[Rounded]:
        """Update main params and model params where the step lands; change nothing where it is skipped.

        ``groups`` are what :meth:`prepare` returned.
        ``publish`` is called with the main params of each batch once their model params are written, or left alone.
        """


def check_inner(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for an optimizer that cannot be wrapped, with the reason."""
    if isinstance(optimizer, CLOSURE_OPTIMIZERS):
        raise ArgumentError(
            f"optimizer {type(optimizer).__name__} needs a closure, which loss scaling cannot serve; use Adam, "
            "AdamW, SGD"
        )
    if isinstance(optimizer, SPARSE_OPTIMIZERS):
        raise ArgumentError(
            f"optimizer {type(optimizer).__name__} works on sparse gradients only; use Adam and a dense embedding"
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ArgumentError(
                f"param group {index} has differentiable=True; a step on main params cannot be differentiated"
            )


def select_update(optimizer: torch.optim.Optimizer, backend: Backend, config: OptimizerConfig) -> InnerUpdate:
    """Return how ``optimizer`` is run. Exact types only: a subclass may have changed ``step()``.

    Raises ArgumentError for 16-bit moments of an optimizer that runs its own ``step()``.
    """
    kinds: dict[type, type[_KernelUpdate]] = {
        torch.optim.Adam: AdamUpdate,
        torch.optim.AdamW: AdamUpdate,
        torch.optim.SGD: SgdUpdate,
        Lion: LionUpdate,
    }
    kind = kinds.get(type(optimizer))
    if kind is not None:
        return kind(optimizer, backend, config)
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(config, name) != torch.float32:
            raise ArgumentError(
                f"config.{name}={getattr(config, name)} needs Adam, AdamW, SGD or Lion, not "
                f"{type(optimizer).__name__}; leave it at torch.float32"
            )
    return GeneralUpdate(optimizer, backend)


class _KernelUpdate(ABC):
    """What Adam and SGD share: eager state, one kernel call per group and device, a detour when hooks ask for it."""

    optional_state: tuple[str, ...] = ()
    """State that a parameter with state may lack: options that ask for it can be switched on at any time."""

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, config: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self.backend = backend
        self._general = GeneralUpdate(optimizer, backend)
        self._entries: list[dict[str, Any]] = []
        self._tag = new_tags(1)
        self._prepared: WeakKeyDictionary[Batch, _Kept] = WeakKeyDictionary()
        dtypes = dict.fromkeys(("exp_avg", "momentum_buffer"), config.exp_avg_dtype)
        dtypes |= dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq"), config.exp_avg_sq_dtype)
        self._state = KernelState(optimizer, dtypes)

    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        """See :class:`InnerUpdate`."""
        self._state.create(params, self.required_state(options))

    def prepare(self, groups: Sequence[GroupUpdate]) -> list[GroupUpdate]:
        """See :class:`InnerUpdate`."""
        if self._hooked() or not all(self.fits(group.options) for group in groups):
            return self._general.prepare(groups)
        self._follow_entries()
        hypers = [self.hyper(group.options) for group in groups]
        return [
            replace(group, call=KernelCall(self._operands(group), hyper))
            for group, hyper in zip(groups, hypers, strict=True)
        ]

    def apply(self, groups: Sequence[GroupUpdate], decision: Decision, publish: Publish) -> list[Rounded]:
        """See :class:`InnerUpdate`."""
        if any(group.call is None for group in groups):
            return self._general.apply(groups, decision, publish)
        rounded = []
        for group in groups:
            prepared, hyper = group.call or ([], None)
            for params, _, operands in prepared:
                device = operands.main[0].device
                rounded.append(Rounded(params, self.run(operands, hyper, decision.to(device))))
            publish(group.batch, prepared[0].operands.written if len(prepared) == 1 else None)
        # Tells an LR scheduler that was built on the inner optimizer that a step was taken.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return rounded

    def readable_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`InnerUpdate`. :meth:`create_states` makes of it what the kernels take."""
        return dict(state)

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """See :class:`InnerUpdate`."""
        return self.state_names(options) + (["step"] if self.counts_steps(options) else [])

    def why_not_capturable(self) -> str | None:
        """See :class:`InnerUpdate`."""
        if self._hooked():
            return f"{type(self.optimizer).__name__} has step hooks, which the host must call: remove them"
        if not all(self.fits(group) for group in self.optimizer.param_groups):
            return f"{type(self.optimizer).__name__} has options that are tensors: give numbers"
        return None

    def _hooked(self) -> bool:
        return self._general.inner_step.is_hooked

    def _follow_entries(self) -> None:
        """Forget what was prepared where a parameter's state is another dict than before."""
        if not same_values(self.optimizer.state, self._entries, self._tag):
            self._entries, self._tag = list(self.optimizer.state.values()), new_tags(1)
            self._prepared.clear()

    def _operands(self, group: GroupUpdate) -> list[Prepared]:
        """Return operands by device; the same objects, with this step's gradients, as long as all else is the same."""
        names = self.required_state(group.options)
        kept = self._prepared.get(group.batch)
        if kept is None or not kept.state.hold(names):
            state = self._state.columns(group.params, names, self.optional_state)
            kept = self._prepared[group.batch] = _Kept(state, _prepare(group.params, state.by_name))
        for prepared in kept.prepared:
            whole = len(prepared.indices) == len(group.grads)
            prepared.operands.grad = group.grads if whole else [group.grads[index] for index in prepared.indices]
        return kept.prepared

    @abstractmethod
    def state_names(self, options: dict[str, Any]) -> list[str]:
        """Return the names of the state tensors of a parameter's shape."""

    @abstractmethod
    def counts_steps(self, options: dict[str, Any]) -> bool:
        """Whether each parameter counts its landed steps."""

    def fits(self, options: dict[str, Any]) -> bool:
        """Whether the kernels can run these options on the device. Tensors but the rate go through torch's own step."""
        return not has_tensors(options, self.numbers)

    numbers: tuple[str, ...]
    """The options that are numbers, but for the rate."""

    @abstractmethod
    def hyper(self, options: dict[str, Any]) -> Any:
        """Return the hyperparameters. Raises ArgumentError for an option of a wrong type, naming it."""

    @abstractmethod
    def run(self, operands: Operands, hyper: Any, decision: Decision) -> Tensor:
        """Call the kernel; returns its flags of overflow."""


def _prepare(params: Sequence[MainParam], state: Mapping[str, Sequence[Tensor]]) -> list[Prepared]:
    """Sort a batch by device. ``state``: columns of the optimizer's state."""
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    mains = [local(param.main) for param in params]
    for index, main in enumerate(mains):
        by_device[main.device].append(index)
    return [
        Prepared(
            [params[index] for index in indices],
            indices,
            Operands(
                model=[params[index].part if params[index].is_copy else mains[index] for index in indices],
                main=[mains[index] for index in indices],
                state={
                    name: [local(column[index]) for index in indices]
                    for name, column in state.items()
                    if name != "step"
                },
                step=[state["step"][index] for index in indices] if "step" in state else [],
            ),
        )
        for indices in by_device.values()
    ]


class AdamUpdate(_KernelUpdate):
    """Adam and AdamW."""

    optional_state = ("max_exp_avg_sq",)
    numbers = ("betas", "eps", "weight_decay")

    def state_names(self, options: dict[str, Any]) -> list[str]:
        """See torch.optim.Adam."""
        return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if options["amsgrad"] else [])

    def counts_steps(self, options: dict[str, Any]) -> bool:
        """Adam's bias correction counts landed steps."""
        return True

    def hyper(self, options: dict[str, Any]) -> AdamHyper:
        """See torch.optim.Adam."""
        beta1, beta2 = pair(options, "betas")
        return AdamHyper(
            lr=rate(options),
            beta1=beta1,
            beta2=beta2,
            eps=number(options, "eps"),
            weight_decay=number(options, "weight_decay"),
            decoupled=bool(options.get("decoupled_weight_decay", type(self.optimizer) is torch.optim.AdamW)),
            amsgrad=bool(options["amsgrad"]),
            maximize=bool(options["maximize"]),
        )

    def run(self, operands: Operands, hyper: AdamHyper, decision: Decision) -> Tensor:
        """One kernel call."""
        return self.backend.adam_(operands, hyper, decision)


class SgdUpdate(_KernelUpdate):
    """SGD with or without momentum."""

    optional_state = ("momentum_buffer", "step")
    numbers = ("momentum", "dampening", "weight_decay")

    def state_names(self, options: dict[str, Any]) -> list[str]:
        """See torch.optim.SGD."""
        return ["momentum_buffer"] if options["momentum"] != 0 else []

    def counts_steps(self, options: dict[str, Any]) -> bool:
        """With dampening the first landed step differs; see the reference backend."""
        return bool(options["momentum"] != 0 and options["dampening"] != 0)

    def hyper(self, options: dict[str, Any]) -> SgdHyper:
        """See torch.optim.SGD."""
        return SgdHyper(
            lr=rate(options),
            momentum=number(options, "momentum"),
            dampening=number(options, "dampening"),
            weight_decay=number(options, "weight_decay"),
            nesterov=bool(options["nesterov"]),
            maximize=bool(options["maximize"]),
        )

    def run(self, operands: Operands, hyper: SgdHyper, decision: Decision) -> Tensor:
        """One kernel call."""
        return self.backend.sgd_(operands, hyper, decision)


class LionUpdate(_KernelUpdate):
    """Lion."""

    optional_state = ("exp_avg",)
    numbers = ("betas", "weight_decay")

    def state_names(self, options: dict[str, Any]) -> list[str]:
        """See :class:`megascale.Lion`."""
        return ["exp_avg"]

    def counts_steps(self, options: dict[str, Any]) -> bool:
        """Lion's rule is the same at every step."""
        return False

    def hyper(self, options: dict[str, Any]) -> LionHyper:
        """See :class:`megascale.Lion`."""
        beta1, beta2 = pair(options, "betas")
        return LionHyper(rate(options), beta1, beta2, number(options, "weight_decay"), bool(options["maximize"]))

    def run(self, operands: Operands, hyper: LionHyper, decision: Decision) -> Tensor:
        """One kernel call."""
        return self.backend.lion_(operands, hyper, decision)


class GeneralUpdate:
    """Any optimizer, through its own ``step()`` on main params. Costs one host read of `found_inf` a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
        self.optimizer = optimizer
        self.backend = backend
        self.inner_step = InnerStep(optimizer)

    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        """Widen state to the main param's dtype. New state is the optimizer's own affair."""
        for param in params:
            if param.is_copy:
                widen(self.optimizer, options, param)

    def readable_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`InnerUpdate`."""
        return with_tensor_counts(self.optimizer, name, state)

    def why_not_capturable(self) -> str | None:
        """See :class:`InnerUpdate`."""
        return (
            f"the host must read the decision for {type(self.optimizer).__name__}, which runs its own step(): "
            "use Adam, AdamW, SGD or megascale.Lion"
        )

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """Nothing is known of the optimizer's state."""
        return []

    def prepare(self, groups: Sequence[GroupUpdate]) -> list[GroupUpdate]:
        """See :class:`InnerUpdate`. Of its state, all but whether there is memory is the optimizer's own affair.

        Raises UsageError, naming the parameter, where there is none.
        """
        for param in (param for group in groups for param in group.params):
            for name, value in self.optimizer.state.get(param.model, {}).items():
                if isinstance(value, Tensor) and (fault := memory_fault(local(value))):
                    raise UsageError(f"the optimizer's state[{param.name!r}][{name!r}] {fault}; load the state anew")
        return [replace(group, call=None) for group in groups]

    def apply(self, groups: Sequence[GroupUpdate], decision: Decision, publish: Publish) -> list[Rounded]:
        """See :class:`InnerUpdate`."""
        if bool(decision.found_inf):
            for group in groups:
                publish(group.batch, None)
            return []
        params = [param for group in groups for param in group.params]
        grads = [grad for group in groups for grad in group.grads]
        with self._on_main_params(params, grads, decision):
            self.inner_step()
        by_device: defaultdict[torch.device, list[MainParam]] = defaultdict(list)
        for param in params:
            if param.is_copy:
                by_device[local(param.main).device].append(param)
        rounded = [
            Rounded(held, self.backend.write_back_([local(p.main) for p in held], [p.part for p in held]))
            for held in by_device.values()
        ]
        for group in groups:
            publish(group.batch, None)
        return rounded

    @contextmanager
    def _on_main_params(self, params: list[MainParam], grads: list[Tensor], decision: Decision) -> Iterator[None]:
        """Show the optimizer main params with unscaled gradients in place of model params; restore all of it after."""
        optimizer, state = self.optimizer, self.optimizer.state
        shown = {id(param.model): param for param in params}
        model_params = [list(group["params"]) for group in optimizer.param_groups]
        narrow = [(param, _widen(state.get(param.model, {}), param.main)) for param in params]
        set_aside = ExitStack()
        try:
            for param, grad in zip(params, grads, strict=True):
                [unscaled] = self.backend.unscale([grad], [local(param.main)], decision.to(grad.device).coefficient)
                if param.main is param.model:
                    set_aside.enter_context(without_grad(param.model))
                param.main.grad = dtensor_like(unscaled, param.main)
                if param.main is not param.model and param.model in state:
                    state[param.main] = state.pop(param.model)
            for group in optimizer.param_groups:
                group["params"] = [shown[id(p)].main for p in group["params"] if id(p) in shown]
            yield
        finally:
            for param in params:
                param.main.grad = None
                if param.main is not param.model and param.main in state:
                    state[param.model] = state.pop(param.main)
            for param, dtypes in narrow:
                for name, dtype in dtypes.items():
                    state[param.model][name] = state[param.model][name].to(dtype)
            for group, originals in zip(optimizer.param_groups, model_params, strict=True):
                group["params"] = originals
            set_aside.close()


def _widen(state: dict[str, Any], main: Tensor) -> dict[str, torch.dtype]:
    """Widen 16-bit moments for torch's own arithmetic, in place of the dict's entries. Returns what they were."""
    narrow = {
        name: value.dtype
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == main.shape and value.dtype in HALF_DTYPES
    }
    state.update({name: state[name].to(main.dtype) for name in narrow})
    return narrow
