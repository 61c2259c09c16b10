"""Runs any optimizer's own ``step()`` on main params, once the host has read that the step lands.

What has kernels is updated by these instead: :mod:`megascale.step.kernel_update`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor

from megascale.errors import InnerStepError, UsageError
from megascale.kernels import (
    Backend,
    Decision,
    Operands,
    memory_fault,
)
from megascale.main_params.main_param import MainParam
from megascale.main_params.update_unit import UpdateUnit
from megascale.rules import BY_KIND, KINDS
from megascale.step.kernel_state import rate
from megascale.step.lending import is_narrow, lent
from megascale.step.torch_states import widen
from megascale.step.update import MarkWritten, OverflowFlags, PendingUpdate
from megascale.utils.dtensors import is_cut, to_local
from megascale.utils.wording import either


class GeneralUpdate:
    """Applies one decision to all updates: to any optimizer's, through its own ``step()`` on main params.

    Costs one host read of `found_inf` a step.

    Only it may call that ``step()``: a torch hook that lives as long as it refuses calls from elsewhere. They would
    update 16-bit model params with scaled gradients, which main params would take for loaded weights.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
        self.optimizer = optimizer
        self.backend = backend
        self._is_stepping, myself = False, ref(self)

        def refuse(inner: torch.optim.Optimizer, *_: Any) -> None:
            update = myself()
            if update is not None and not update._is_stepping:
                raise UsageError(
                    f"{type(inner).__name__}.step() was called, but a MixedPrecisionOptimizer wraps this optimizer: "
                    "call the wrapper's step(), which unscales the gradients and updates main params. To train without "
                    "it again, drop the wrapper"
                )

        self._hook = optimizer.register_step_pre_hook(refuse)
        finalize(self, self._hook.remove)
        # Of these it is known that they keep no 16-bit state of their own accord.
        kind = type(optimizer)
        self._is_torchs = kind in BY_KIND or kind.__module__.split(".")[:2] == ["torch", "optim"]

    @property
    def is_hooked(self) -> bool:
        """Whether the optimizer's own step has hooks other than ours."""
        pre_hooks, post_hooks = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        return bool(post_hooks) or len(pre_hooks) > (self._hook.id in pre_hooks)

    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        """Make the state of parameters of one group that have none.

        Here state that was loaded or made of 16-bit parameters is converted, and that of parameters others own dropped.
        New state is the optimizer's own affair: it is made of fp32 main params, so that what is 16-bit in it is so on
        purpose.
        """
        for param in params:
            if not param.is_owned:
                self.optimizer.state.pop(param.model, None)
            elif self._is_torchs or (param.is_copy and param.narrow_state is None):
                widen(self.optimizer, options, param, is_torchs=self._is_torchs)
        self._note_narrow_state(params)

    def _note_narrow_state(self, params: Sequence[MainParam]) -> None:
        """Remember which state is 16-bit now: whatever else is found so later was made of 16-bit weights."""
        for param in () if self._is_torchs else params:
            entry = self.optimizer.state.get(param.model, {}) if param.is_copy else {}
            param.narrow_state = frozenset(name for name, value in entry.items() if is_narrow(value, param))

    def take_in_state(self) -> bool:
        """Copy what a program has put into the optimizer's state into its place; of an own ``step()`` it has none.

        Returns whether there was something. Raises UsageError, with nothing changed.
        """
        return False

    def required_state(self, options: dict[str, Any]) -> list[str]:
        """Return the keys without which a saved state of a parameter is not whole; none of an own ``step()`` is."""
        return []

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise an error for options of a param group that :meth:`prepare` could not use."""
        if "lr" in options:
            rate(options)

    def load_state(self, param: MainParam, state: dict[str, Any]) -> dict[str, Any]:
        """Return a loaded state, which was checked, as the optimizer's state is to show it: in its place, if any.

        :meth:`create_states` converts the rest.
        """
        return state

    def update_signature(self) -> str:
        """Return what decides how an update rounds, besides its options: the same on ranks whose bits are the same."""
        ways = {name: [group.get(name) for group in self.optimizer.param_groups] for name in ("foreach", "fused")}
        chosen = "".join(
            f", {name}={values}" for name, values in ways.items() if any(one is not None for one in values)
        )
        return f"{type(self.optimizer).__name__}'s own step(){chosen}, backend {self.backend.name}"

    def why_not_capturable(self) -> str | None:
        """Return why updates cannot be part of a device's graph; None where they can."""
        return (
            f"the host must read the decision for {type(self.optimizer).__name__}, which runs its own step(): "
            f"use {either([kind.__name__ for kind in KINDS])}"
        )

    def release_memory(self, units: Sequence[UpdateUnit]) -> None:
        """Let go of the memory of main params and state of all units: it is read anew in the next step."""

    def raise_failure(self) -> None:
        """Raise, once, what the update before has raised in another thread, where main params may be changed in part.

        Raises InnerStepError, GradientError.
        """

    def forget_failure(self) -> None:
        """Forget what :meth:`raise_failure` would raise: all that it may have changed was replaced."""

    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        """Return the updates ready for :meth:`apply`, which must follow before their tensors can change.

        Checks all that the update reads or writes except gradients and model params. What else the optimizer's own
        ``step()`` reads is its own affair.

        Raises a MegascaleError for what cannot be updated, naming it: no value has changed. Here UsageError for state
        without memory, and ArgumentError for a learning rate that is neither a number nor a tensor of one.
        """
        for pending in updates:
            for options in pending.options:
                self.check_options(options)
        self.require_usable_state(param for pending in updates for param in pending.params)
        return [replace(pending, calls=None) for pending in updates]

    def require_usable_state(self, params: Iterable[MainParam]) -> None:
        """Raise UsageError, naming it, for state without memory, or that a method made of 16-bit weights."""
        for param in params:
            narrow = param.narrow_state if param.is_copy and not self._is_torchs else None
            for name, value in self.optimizer.state.get(param.model, {}).items():
                if isinstance(value, Tensor) and (fault := memory_fault(to_local(value))):
                    raise UsageError(f"the optimizer's state[{param.name!r}][{name!r}] {fault}; load the state anew")
                if narrow is not None and is_narrow(value, param) and name not in narrow:
                    raise UsageError(
                        f"the optimizer's state[{param.name!r}][{name!r}] is {param.form.dtype}, as the parameter is: "
                        f"a method of {type(self.optimizer).__name__} has made it of 16-bit weights or scaled "
                        "gradients. Call the method inside `with optimizer.main_grads() as inner:`, which shows it "
                        "fp32 ones; and delete this state, or load a checkpoint"
                    )

    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        """Update main params and model params where the step lands; change nothing where it is skipped.

        ``updates`` are what :meth:`prepare` returned.
        ``mark_written`` is called with the main params of each unit once their model params are written, or left alone.

        Raises InnerStepError where the optimizer's ``step()`` raises. Model params are then the roundings of main
        params nevertheless, and other ranks get what they wait for.
        """
        # The one host read: torch's step() cannot look at the decision on the device.
        if bool(decision.found_inf):
            for pending in updates:
                mark_written(pending.unit)
            return []
        owned = [(param, grad) for pending in updates for param, grad in pending.pairs() if param.is_owned]
        params, grads = [param for param, _ in owned], [grad for _, grad in owned]
        # Empty pieces too: the optimizer makes and counts state of them that all ranks have alike.
        empty = [param for pending in updates for param in pending.unit.counted if param.is_owned]
        failure: Exception | None = None
        for param in params:
            param.decode()
        try:
            unscaled = [*self.unscaled(params, grads, decision), *(torch.empty_like(param.main) for param in empty)]
            with self.lend([*params, *empty], unscaled):
                self._is_stepping = True
                self.optimizer.step()
        except Exception as error:  # whatever it is: other ranks wait
            failure = error
        finally:
            self._is_stepping = False
        # After a failure, too: model params must be the roundings of main params, and other ranks wait for the gathers
        # that mark_written() starts.
        overflow_flags = self.round_(params, decision)
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

    def round_(self, params: Sequence[MainParam], decision: Decision) -> list[OverflowFlags]:
        """Round main params into their model params, with their remainders where they are held so.

        ``decision``: of a step that lands.
        """
        by_device: defaultdict[torch.device, list[MainParam]] = defaultdict(list)
        for param in params:
            if param.is_copy:
                by_device[to_local(param.main).device].append(param)
        found = []
        for device, copies in by_device.items():
            remainders = [to_local(param.remainder) for param in copies if param.remainder is not None]
            models, mains = [param.rounded for param in copies], [to_local(param.main) for param in copies]
            operands = Operands(model=models, main=mains, remainder=remainders)
            if remainders:
                flags = self.backend.encode_(operands, decision.to(device).found_inf)
                for param in copies:
                    param.release()
            else:
                flags = self.backend.write_back_(operands)
            found.append(OverflowFlags(copies, flags))
        return found

    @contextmanager
    def lend(self, params: Sequence[MainParam], grads: Sequence[Tensor | None]) -> Iterator[None]:
        """Lend main params to the optimizer inside the context: see :func:`megascale.step.lending.lent`."""
        try:
            with lent(self.optimizer, params, grads):
                yield
        finally:
            self._note_narrow_state(params)

    def unscaled(self, params: Sequence[MainParam], grads: Sequence[Tensor], decision: Decision) -> Sequence[Tensor]:
        """Return new local gradients, in the dtypes of main params, times the decision's coefficient."""
        by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
        for index, grad in enumerate(grads):
            by_device[grad.device].append(index)
        found: dict[int, Tensor] = {}
        for device, indices in by_device.items():
            given, mains = [grads[index] for index in indices], [to_local(params[index].main) for index in indices]
            made = self.backend.unscale(given, mains, decision.to(device).coefficient)
            found.update(zip(indices, made, strict=True))
        return [found[index] for index in range(len(grads))]
