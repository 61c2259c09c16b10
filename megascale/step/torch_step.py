"""Runs any other optimizer's own ``step()`` on main params, once the host has read that the step lands."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megascale.errors import InnerStepError, UsageError
from megascale.kernels import (
    Backend,
    Decision,
    memory_fault,
)
from megascale.main_params.main_param import MainParam
from megascale.rules import KINDS
from megascale.step.decoded import held_params
from megascale.step.inner_step import InnerStep, replaceable_grad
from megascale.step.kernel_state import rate
from megascale.step.own_state import check_options, check_state, complete_state
from megascale.step.torch_states import state_of, widen, with_tensor_counts
from megascale.step.update import InnerUpdate, MarkWritten, OverflowFlags, PendingUpdate
from megascale.utils.dtensors import dtensor_like, is_cut, to_local
from megascale.utils.dtypes import HALF_DTYPES
from megascale.utils.wording import either


class GeneralUpdate(InnerUpdate):
    """Any optimizer, through its own ``step()`` on main params. Costs one host read of `found_inf` a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, inner_step: InnerStep | None = None) -> None:
        self.optimizer = optimizer
        self.backend = backend
        self.inner_step = inner_step or InnerStep(optimizer)

    def backend_on(self, device: torch.device) -> Backend:
        """Return the backend of main params that are on ``device``."""
        return self.backend

    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        """Widen state to the main param's dtype, and drop that of parameters that other ranks own.

        New state is the optimizer's own affair.
        """
        for param in params:
            if not param.is_owned:
                self.optimizer.state.pop(param.model, None)
            if param.is_copy:
                widen(self.optimizer, options, param)

    @override
    def check_options(self, options: dict[str, Any]) -> None:
        if "lr" in options:
            rate(options)
        check_options(self.optimizer, options)

    @override
    def readable_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        return with_tensor_counts(self.optimizer, name, state)

    @override
    def update_signature(self) -> str:
        ways = {name: [group.get(name) for group in self.optimizer.param_groups] for name in ("foreach", "fused")}
        chosen = "".join(
            f", {name}={values}" for name, values in ways.items() if any(one is not None for one in values)
        )
        return f"{type(self.optimizer).__name__}'s own step(){chosen}, backend {self.backend.name}"

    @override
    def why_not_capturable(self) -> str | None:
        return (
            f"the host must read the decision for {type(self.optimizer).__name__}, which runs its own step(): "
            f"use {either([kind.__name__ for kind in KINDS])}"
        )

    @override
    def release_scratch(self) -> None:
        """Do nothing: there is none."""

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """Return no keys: the optimizer's state is not known."""
        return []

    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        """See :class:`InnerUpdate`. Of optimizers that are not torch's only memory and learning rate are checked.

        Raises UsageError, naming the parameter, for state without memory, and ArgumentError for a learning rate
        that is neither a number nor a tensor of one; see :mod:`megascale.step.own_state` for those of torch. Nothing
        has changed then.
        """
        for pending in updates:
            self.check_options(pending.options)
        every = [(pending.options, param) for pending in updates for param in pending.params]
        for options, param in every:
            state = state_of(self.optimizer, param)
            for name, value in state.items():
                if isinstance(value, Tensor) and (fault := memory_fault(to_local(value))):
                    raise UsageError(f"the optimizer's state[{param.name!r}][{name!r}] {fault}; load the state anew")
            if param.is_owned:
                check_state(self.optimizer, options, param, state)
        for options, param in every:
            if param.is_owned:
                complete_state(self.optimizer, options, param, state_of(self.optimizer, param))
        return [replace(pending, call=None) for pending in updates]

    @override
    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        """See :class:`InnerUpdate`.

        Raises InnerStepError where the optimizer's ``step()`` raises. Model params are then the roundings of main
        params nevertheless, and other ranks get what they wait for.
        """
        # The one host read: torch's step() cannot look at the decision on the device.
        if bool(decision.found_inf):
            for pending in updates:
                mark_written(pending.unit)
            return []
        pairs = [pair for pending in updates for pair in zip(pending.params, pending.grads, strict=True)]
        owned = [(param, grad) for param, grad in pairs if param.is_owned]
        params, grads = [param for param, _ in owned], [grad for _, grad in owned]
        failure: Exception | None = None
        for param in params:
            param.decode()
        try:
            with self._on_main_params(params, grads, decision):
                self.inner_step()
        except Exception as error:  # whatever it is: other ranks wait
            failure = error
        # After a failure, too: model params must be the roundings of main params, and other ranks wait for the gathers
        # that mark_written() starts.
        by_device: defaultdict[torch.device, list[MainParam]] = defaultdict(list)
        for param in params:
            if param.is_copy:
                by_device[to_local(param.main).device].append(param)
        overflow_flags = [OverflowFlags(held, self._round(held, decision)) for held in by_device.values()]
        for pending in updates:
            mark_written(pending.unit)
        if failure is not None:
            remedy = "mend the cause, then load a checkpoint or a state dict"
            if any(is_cut(param.model) for param in params):
                remedy = (
                    "if it cannot compute with DTensors, which fully_shard() and tensor parallelism make of "
                    "parameters: leave the model plain and build DistributedOptimizer(..., shard='parameters'), which "
                    f"gives it whole tensors; else {remedy}"
                )
            raise InnerStepError(
                f"{type(self.optimizer).__name__}.step() raised {type(failure).__name__}: {failure}; some main params "
                f"may be updated and others not: {remedy}"
            ) from failure
        return overflow_flags

    def _round(self, params: list[MainParam], decision: Decision) -> Tensor:
        """Round main params of one device into their model params, with their remainders where they are held so."""
        mains, models = [to_local(param.main) for param in params], [param.rounded for param in params]
        if params[0].remainder is None:
            return self.backend_on(mains[0].device).write_back_(mains, models)
        held = held_params(params, models, mains)
        device = mains[0].device
        flags = self.backend_on(device).encode_(held, decision.to(device).found_inf)
        for param in params:
            param.release()
        return flags

    @contextmanager
    def _on_main_params(self, params: list[MainParam], grads: list[Tensor], decision: Decision) -> Iterator[None]:
        """Show the optimizer main params with unscaled gradients in place of model params; restore all of it after."""
        optimizer, state = self.optimizer, self.optimizer.state
        shown = {id(param.model): param for param in params}
        model_params = [list(group["params"]) for group in optimizer.param_groups]
        narrow = [(param, _widen(state.get(param.model, {}), param.main)) for param in params]
        set_aside = ExitStack()
        decided = {device: decision.to(device) for device in {grad.device for grad in grads}}
        try:
            for param, grad in zip(params, grads, strict=True):
                backend, there = self.backend_on(grad.device), decided[grad.device]
                [unscaled] = backend.unscale([grad], [to_local(param.main)], there.coefficient)
                if param.main is param.model:
                    set_aside.enter_context(replaceable_grad(param.model))
                param.main.grad = dtensor_like(unscaled, param.main)
                # State is keyed by parameter: it moves to the key under which step() looks for it.
                if param.main is not param.model and param.model in state:
                    state[param.main] = state.pop(param.model)
            # Only parameters of this step: others may still have a gradient, and step() would update them by it.
            for group in optimizer.param_groups:
                group["params"] = [shown[id(p)].main for p in group["params"] if id(p) in shown]
            yield
        finally:
            state = optimizer.state  # its step may have replaced it
            for param in params:
                param.main.grad = None
                if param.main is not param.model and param.main in state:
                    state[param.model] = state.pop(param.main)
            for group, originals in zip(optimizer.param_groups, model_params, strict=True):
                group["params"] = originals
            set_aside.close()
            for param, dtypes in narrow:
                own = state.get(param.model, {})
                own.update({name: own[name].to(dtype) for name, dtype in dtypes.items() if name in own})


def _widen(state: dict[str, Any], main: Tensor) -> dict[str, torch.dtype]:
    """Replace 16-bit moments in ``state`` by wide ones, for torch's own arithmetic. Returns their former dtypes."""
    narrow = {
        name: value.dtype
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == main.shape and value.dtype in HALF_DTYPES
    }
    state.update({name: state[name].to(main.dtype) for name in narrow})
    return narrow
