"""How the wrapped optimizer's math reaches the main params: by our kernels, or through its own ``step()``.

Adam, AdamW and SGD run on our kernels, which obey `found_inf` on the device. Any other optimizer cannot, so the host
reads `found_inf` once and calls its ``step()`` where the step lands. Both keep the state in torch's own layout, keyed
by model param.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megascale.errors import ArgumentError
from megascale.kernels import AdamHyper, Backend, Decision, Operands, SgdHyper
from megascale.main_params import MainParam, local

CLOSURE_OPTIMIZERS = (torch.optim.LBFGS,)
SPARSE_OPTIMIZERS = (torch.optim.SparseAdam,)


@dataclass(frozen=True)
class GroupUpdate:
    """A batch of one param group: its options, main params that have gradients, and those gradients, local."""

    options: dict[str, Any]
    params: list[MainParam]
    grads: list[Tensor]


@dataclass(frozen=True)
class Rounded:
    """Main params of one device and, shape [len(params)], whether the rounding of each into fp16 was not finite."""

    params: list[MainParam]
    overflowed: Tensor


Publish = Callable[[Sequence[MainParam]], None]


class InnerUpdate(Protocol):
    """Applies one decision to all groups."""

    def create_state(self, options: dict[str, Any], param: MainParam) -> None:
        """Make the state of a parameter that has none."""

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """Return the keys without which a saved state of a parameter is not whole."""

    def apply(self, groups: Sequence[GroupUpdate], decision: Decision, publish: Publish) -> list[Rounded]:
        """Update main params and model params where the step lands; change nothing where it is skipped.

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


def select_update(optimizer: torch.optim.Optimizer, backend: Backend) -> InnerUpdate:
    """Return how ``optimizer`` is run. Exact types only: a subclass may have changed ``step()``."""
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return AdamUpdate(optimizer, backend)
    if kind is torch.optim.SGD:
        return SgdUpdate(optimizer, backend)
    return GeneralUpdate(optimizer, backend)


class _KernelUpdate(ABC):
    """What Adam and SGD share: eager state, one kernel call per group and device, a detour when hooks ask for it."""

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
        self.optimizer = optimizer
        self.backend = backend
        self._general = GeneralUpdate(optimizer, backend)

    def create_state(self, options: dict[str, Any], param: MainParam) -> None:
        """Make the state of a parameter, in its main param's dtype; state that is there already keeps its values."""
        state = self.optimizer.state[param.model]
        for name in self.state_names(options):
            if state.get(name) is None:
                state[name] = torch.zeros_like(param.main, requires_grad=False, memory_format=torch.preserve_format)
            elif state[name].dtype.itemsize < param.main.dtype.itemsize:
                state[name] = state[name].to(param.main.dtype)
        if self.counts_steps(options):
            step = state.get("step", 0.0)
            value = step.detach().float() if isinstance(step, Tensor) else float(step)
            device = local(param.main).device
            state["step"] = value.to(device) if isinstance(value, Tensor) else torch.tensor(value, device=device)

    def apply(self, groups: Sequence[GroupUpdate], decision: Decision, publish: Publish) -> list[Rounded]:
        """See :class:`InnerUpdate`."""
        if self._hooked() or not all(self.fits(group.options) for group in groups):
            return self._general.apply(groups, decision, publish)
        rounded = []
        for group in groups:
            for device, (params, operands) in self._operands(group).items():
                rounded.append(Rounded(params, self.run(operands, group.options, decision.to(device))))
            publish(group.params)
        # Tells an LR scheduler that was built on the inner optimizer that a step was taken.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return rounded

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """See :class:`InnerUpdate`."""
        return self.state_names(options) + (["step"] if self.counts_steps(options) else [])

    def _hooked(self) -> bool:
        return bool(self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks)

    def _operands(self, group: GroupUpdate) -> dict[torch.device, tuple[list[MainParam], Operands]]:
        by_device: defaultdict[torch.device, tuple[list[MainParam], Operands]] = defaultdict(lambda: ([], Operands()))
        names = self.state_names(group.options)
        for param, grad in zip(group.params, group.grads, strict=True):
            main = local(param.main)
            params, operands = by_device[main.device]
            params.append(param)
            operands.main.append(main)
            operands.model.append(param.part if param.is_copy else main)
            operands.grad.append(grad)
            state = self.optimizer.state[param.model]
            for name in names:
                operands.state.setdefault(name, []).append(local(state[name]))
            if self.counts_steps(group.options):
                operands.step.append(state["step"])
        return by_device

    @abstractmethod
    def state_names(self, options: dict[str, Any]) -> list[str]:
        """Return the names of the state tensors of a parameter's shape."""

    @abstractmethod
    def counts_steps(self, options: dict[str, Any]) -> bool:
        """Whether each parameter counts its landed steps."""

    @abstractmethod
    def fits(self, options: dict[str, Any]) -> bool:
        """Whether the kernels can run these options on the device."""

    @abstractmethod
    def run(self, operands: Operands, options: dict[str, Any], decision: Decision) -> Tensor:
        """Call the kernel; returns its flags of overflow."""


class AdamUpdate(_KernelUpdate):
    """Adam and AdamW."""

    def state_names(self, options: dict[str, Any]) -> list[str]:
        """See torch.optim.Adam."""
        return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if options["amsgrad"] else [])

    def counts_steps(self, options: dict[str, Any]) -> bool:
        """Adam's bias correction counts landed steps."""
        return True

    def fits(self, options: dict[str, Any]) -> bool:
        """Tensor betas go through torch's own step."""
        return not any(isinstance(beta, Tensor) for beta in options["betas"])

    def run(self, operands: Operands, options: dict[str, Any], decision: Decision) -> Tensor:
        """One kernel call."""
        beta1, beta2 = options["betas"]
        decoupled = options.get("decoupled_weight_decay", type(self.optimizer) is torch.optim.AdamW)
        hyper = AdamHyper(
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=options["eps"],
            weight_decay=options["weight_decay"],
            decoupled=decoupled,
            amsgrad=options["amsgrad"],
            maximize=options["maximize"],
        )
        return self.backend.adam_(operands, hyper, decision)


class SgdUpdate(_KernelUpdate):
    """SGD with or without momentum."""

    def state_names(self, options: dict[str, Any]) -> list[str]:
        """See torch.optim.SGD."""
        return ["momentum_buffer"] if options["momentum"] != 0 else []

    def counts_steps(self, options: dict[str, Any]) -> bool:
        """With dampening the first landed step differs; see the reference backend."""
        return bool(options["momentum"] != 0 and options["dampening"] != 0)

    def fits(self, options: dict[str, Any]) -> bool:
        """All options run on our kernels."""
        return True

    def run(self, operands: Operands, options: dict[str, Any], decision: Decision) -> Tensor:
        """One kernel call."""
        hyper = SgdHyper(
            lr=options["lr"],
            momentum=options["momentum"],
            dampening=options["dampening"],
            weight_decay=options["weight_decay"],
            nesterov=options["nesterov"],
            maximize=options["maximize"],
        )
        return self.backend.sgd_(operands, hyper, decision)


class GeneralUpdate:
    """Any optimizer, through its own ``step()`` on main params. Costs one host read of `found_inf` a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
        self.optimizer = optimizer
        self.backend = backend

    def create_state(self, options: dict[str, Any], param: MainParam) -> None:
        """Widen state of the main param's shape to its dtype. New state is the optimizer's own affair."""
        if not param.is_copy:
            return
        state = self.optimizer.state.get(param.model, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == param.main.shape:
                state[name] = value.to(param.main.dtype)

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """Nothing is known of the optimizer's state."""
        return []

    def apply(self, groups: Sequence[GroupUpdate], decision: Decision, publish: Publish) -> list[Rounded]:
        """See :class:`InnerUpdate`."""
        if bool(decision.found_inf):
            for group in groups:
                publish(group.params)
            return []
        params = [param for group in groups for param in group.params]
        grads = [grad for group in groups for grad in group.grads]
        with self._on_main_params(params, grads, decision):
            self.optimizer.step()
        by_device: defaultdict[torch.device, list[MainParam]] = defaultdict(list)
        for param in params:
            if param.is_copy:
                by_device[local(param.main).device].append(param)
        rounded = [
            Rounded(held, self.backend.write_back_([local(p.main) for p in held], [p.part for p in held]))
            for held in by_device.values()
        ]
        for group in groups:
            publish(group.params)
        return rounded

    @contextmanager
    def _on_main_params(self, params: list[MainParam], grads: list[Tensor], decision: Decision) -> Iterator[None]:
        """Show the optimizer main params with unscaled gradients in place of model params; restore all of it after."""
        optimizer, state = self.optimizer, self.optimizer.state
        shown = {id(param.model): param for param in params}
        model_params = [list(group["params"]) for group in optimizer.param_groups]
        model_grads = [(param.model, param.model.grad) for param in params]
        try:
            for param, grad in zip(params, grads, strict=True):
                [unscaled] = self.backend.unscale([grad], [local(param.main)], decision.to(grad.device).coefficient)
                param.model.grad = None
                param.main.grad = like_param(unscaled, param.main)
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
            for group, originals in zip(optimizer.param_groups, model_params, strict=True):
                group["params"] = originals
            for model, model_grad in model_grads:
                model.grad = model_grad


def like_param(local_value: Tensor, param: Tensor) -> Tensor:
    """Return a local tensor as the kind of tensor ``param`` is: a DTensor of its placements, or itself."""
    if not isinstance(param, DTensor):
        return local_value
    return DTensor.from_local(
        local_value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
