"""StepMember: one optimizer's part in a step. It measures its gradients, and updates its parameters as decided."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

import torch
from torch import Tensor, UntypedStorage, nn

from megascale.config import StepConfig
from megascale.errors import MegascaleError, UsageError
from megascale.grad_sync.reduced_grads import ReducedGrads
from megascale.grad_sync.sync import GradSync
from megascale.kernels import NUM_STATISTICS, WITH_GRADS, Backend, Statistic
from megascale.kernels.decision import StepDecision
from megascale.main_params.base import MainParams
from megascale.main_params.main_param import MainParam
from megascale.parallel import ParallelGroups
from megascale.step.grad_stats import GradStats, measured_by_device
from megascale.step.local_grads import Collected, ReadyGrads
from megascale.step.result import CapturedStep, StepCounter
from megascale.step.torch_states import is_per_element
from megascale.step.update_selection import select_update
from megascale.utils.dtensors import held
from megascale.utils.nests import tensors_in
from megascale.utils.portable import NO_OPTIONS, portable

if TYPE_CHECKING:
    from megascale.step.recipe import StepRecipe


class StepMember:
    """One optimizer's main params, state, gradients and update.

    Attributes:
        ready: a step that was decided and is not yet taken: what it will update, and the decision; None: there is none.
        chain: the recipe of the newest ChainedOptimizer that steps this member with others; None: none does.
        is_lent: whether the wrapped optimizer holds its main params just now, outside of a step.
        grads: what collects its gradients.
        captured: steps of it that graphs hold.

    Args:
        optimizer: the wrapped one; its ``param_groups`` and ``state`` are live.
        config: checked against the parameters.
        groups: which ranks share what.
        backend: for all passes over memory.
        device: where decisions live.
        main_params: where main params and state live.
        grad_sync, replicas_may_differ: see :class:`megascale.MixedPrecisionOptimizer`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: StepConfig,
        groups: ParallelGroups,
        backend: Backend,
        device: torch.device,
        main_params: MainParams,
        grad_sync: ReducedGrads | None,
        *,
        replicas_may_differ: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.config = config
        self.backend = backend
        self.device = device
        self.main_params = main_params
        self.grad_sync = grad_sync
        self.update = select_update(optimizer, backend, config, device, main_params.arrivals)
        self.counter = StepCounter(device)
        self.replicas_may_differ = replicas_may_differ
        self.ready: tuple[Collected, StepDecision] | None = None
        self.is_lent = False
        self.captured: WeakSet[CapturedStep] = WeakSet()
        self.chain: ref[StepRecipe] | None = None
        self.grads = ReadyGrads(
            groups, device, grad_sync, sharded=main_params.is_sharded, replicas_may_differ=replicas_may_differ
        )

    # Before the decision

    def sync_from_model(self) -> None:
        """Take over changes of ``param_groups`` and writes to model params."""
        self.require_not_lent("this call")
        made = self.main_params.sync_from_model(self.optimizer.param_groups)
        if made:
            self._make_states(made)

    @torch.no_grad()
    def _make_states(self, made: Sequence[MainParam]) -> None:
        """Check new parameters, and make their state; drop that of parameters that are no longer there."""
        param_groups, created = self.optimizer.param_groups, {id(param) for param in made}
        here = {id(param) for group in param_groups for param in group["params"]}
        state = self.optimizer.state
        for gone in [key for key in state if isinstance(key, Tensor) and id(key) not in here]:
            del state[gone]
        for unit, group in [(one, group) for one in self.main_params.units() for group in one.groups]:
            # State lies in memory as it is updated.
            new = [param for param in chain(unit.groups[group], unit.elsewhere) if id(param) in created]
            for param in new:
                self.grads.validate_param(param)
                if self.main_params.is_sharded and param.model in state:
                    # Of state from before the optimizer was wrapped, this rank's part.
                    state[param.model] = {
                        key: self.main_params.to_local(param.model, value, value.dtype)
                        if isinstance(value, Tensor) and is_per_element(key, value, param.model)
                        else value
                        for key, value in state[param.model].items()
                    }
            self.update.create_states(param_groups[group], new)

    def require_not_lent(self, call: str) -> None:
        """Raise UsageError inside the context of :mod:`megascale.step.main_grads`."""
        if self.is_lent:
            raise UsageError(
                f"{call} came inside with optimizer.main_grads(), where the wrapped optimizer holds the main params: "
                "leave the context first"
            )

    def sync_to_pack(self, *, to_load: bool) -> None:
        """As :meth:`sync_from_model`; take in what was put into the state, unless that is about to be replaced.

        Raises an error that the step before has left, unless ``to_load``.
        """
        if not to_load:
            self.main_params.require_no_early_write()
        self.sync_from_model()
        if not to_load:
            self.update.raise_failure()
            if not self.main_params.residence.is_away:
                self.update.take_in_state()

    def offload(self, *, pin: bool) -> None:
        """Move main params, state and main grads to host memory; see :meth:`megascale.MixedPrecisionOptimizer.offload`.

        Communicates nothing.
        """
        self.require_not_lent("offload()")
        if self.main_params.residence.is_away:
            return
        if self.ready is not None:
            raise UsageError(
                "offload() came between prepare_grads() and the update that it decided: take the step with "
                "step_with_ready_grads() first, or call zero_grad()"
            )
        if isinstance(self.grad_sync, GradSync):
            self.grad_sync.require_idle()
        self.main_params.wait()
        self.update.take_in_state()
        at_home = {id(param.model) for param in self.main_params if param.on_host is not None}  # in host memory already
        mains = (param.memory for param in self.main_params if param.is_copy and param.on_host is None)
        held = (state for param, state in self.optimizer.state.items() if id(param) not in at_home)
        states = chain.from_iterable(map(tensors_in, held))
        self.update.release_memory(self.main_params.units())
        self.main_params.residence.leave(chain(mains, states), pin=pin)
        self.release_captured()  # graphs would keep the memory that is to be free
        try:
            if isinstance(self.grad_sync, GradSync):
                self.grad_sync.leave(pin=pin)
        except UsageError:  # the host has no memory left
            self.reload()
            raise

    def reload(self) -> None:
        """Bring back what :meth:`offload` moved."""
        if isinstance(self.grad_sync, GradSync):
            self.grad_sync.come_back()
        self.main_params.residence.come_back()

    def collect(self) -> Collected:
        """Finish reductions; return the local gradients, and all that their update needs.

        All of it is checked: once ranks have agreed, nothing can fail. An error of this rank is returned, not raised:
        other ranks wait for its statistics.
        """
        found: Exception | None = None
        try:
            self.main_params.residence.require_here("step()")
            self.main_params.require_no_early_write()
            self.sync_from_model()
            self.update.take_in_state()  # after it: state of a parameter that is new, or has moved, has new places
            if not self.counter.steps:  # an option that a state dict cannot hold fails now, not at the first save
                for index, group in enumerate(self.optimizer.param_groups):
                    options = {name: value for name, value in group.items() if name not in NO_OPTIONS}
                    portable(options, f"param_groups[{index}]", copy=False)
        except Exception as error:  # whatever it is: other ranks wait
            found = error
        try:
            if self.grad_sync is not None:
                self.grad_sync.finish()  # also on a rank with an error: others wait for its reductions
        except MegascaleError as error:
            found = error
        try:
            collected = self.grads.collect(self.optimizer.param_groups, self.main_params, found)
            if collected.error is None:
                collected.updates = self.update.prepare(collected.updates)
            return collected
        except Exception as error:  # likewise
            return self.grads.failed(error)

    def measure(self, collected: Collected, errors: Tensor, scaled: bool) -> GradStats:
        """Measure this rank's own gradients in one pass. The statistics are on the member's device.

        Args:
            collected: the gradients, on any devices; of a missing one all numbers are 0.
            errors: 0-d, this rank's errors, in the dtype of statistics.
            scaled: False if this rank knows that the loss was not scaled.
        """
        grads, count_zeros = collected.grads, self.config.log_num_zeros_in_grad
        has_grads = bool(collected.updates)
        if isinstance(self.grad_sync, GradSync) and not self.grad_sync.has_taken:
            # Main grads that took none in are zeros: what counts is a gradient beside them.
            has_grads = any(param.model.grad is not None for update in collected.updates for param in update.params)
        marks = scaled - WITH_GRADS * has_grads
        # A rank without gradients has statistics, too: others wait for it in the all-reduce, and it may have an error.
        if not grads.num_there:
            vector = torch.zeros(NUM_STATISTICS, dtype=errors.dtype, device=self.device)
            # fill_(), as an assigned number is copied from the host, which waits for the device.
            vector[Statistic.ZEROS].fill_(0.0 if count_zeros else math.nan)
            vector[Statistic.ERRORS] = errors
            vector[Statistic.SCALED].fill_(marks)
            return GradStats(vector, None, (None,))
        if grads.forms.devices == {self.device}:
            stats = self.backend.measure(grads, count_zeros)
        else:
            stats = measured_by_device(grads, self.backend, count_zeros, self.device)
        vector = self.backend.total(stats, collected.weights, errors, marks)
        return GradStats(vector, stats.non_finite, (stats.sum_squares,))

    def absent(self, collected: Collected) -> dict[str, nn.Parameter]:
        """Return, by name, parameters that other ranks have, too, but that this rank leaves out.

        They are sharded, or have a main param.
        """
        if self.replicas_may_differ:
            return {}
        everywhere = self.main_params.everywhere
        num_updated = sum(update.grads.num_there + len(update.unit.counted) for update in collected.updates)
        if num_updated == (len(everywhere) or sum(map(len, self.main_params.ordered))):
            return {}
        everywhere = everywhere or {param.name: param.model for param in self.main_params}
        present = {id(param.model) for update in collected.updates for param in update.trained()}
        return {name: param for name, param in everywhere.items() if id(param) not in present}

    # For a graph that holds the step

    def captured_memory(self) -> list[UntypedStorage]:
        """Return the storages of weights, gradients, main params and state."""
        params = list(self.main_params)
        grads = (grad for grad in map(self.grads.grad_of, params) if grad is not None)
        states = chain.from_iterable(map(tensors_in, self.optimizer.state.values()))
        every = chain((param.model for param in params), (param.memory for param in params), grads, states)
        return [held(tensor).untyped_storage() for tensor in every]

    def release_captured(self) -> None:
        """Let graphs that hold a step of this member be of no use: what it updates lies elsewhere now."""
        for step in self.captured:
            step.memory.clear()
        self.captured.clear()

    def why_not_capturable(self) -> str | None:
        """Return why a step cannot be part of a device's graph; None where it can."""
        others = {param.model.device for param in self.main_params} - {self.device}
        if others:
            return f"its parameters are on {self.device} and on {others.pop()}: a graph is of one device"
        return self.main_params.why_not_capturable() or self.update.why_not_capturable()
