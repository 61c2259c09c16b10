"""The recipe of a step: finish, measure, agree, decide, rescale, update, gather. For one optimizer, or for a chain.

**Two halves of a step.** :meth:`StepRecipe.prepare` decides and :meth:`StepRecipe.apply` updates. The cut lies behind
the one message of the decision and before the first write to a main param: whatever can be found wrong is found before
it, so that a step is whole or not at all, on every rank. ``step()`` takes both at once; a caller who wants the norm
first, or clips by value, takes them apart.

**The first half** ends with a decision that all ranks share. It sends the only message of the decision, and every rank
reaches that message, also one that has found an error: the error is counted in the vector of statistics instead of
raised, because the other ranks wait for this one. After the message all ranks know of it, and raise together. This
half moves the loss scale, so that the same gradients must not be prepared twice.

**The second half** asks nobody. It reads the decision on the device, where a skipped step writes nothing. An error here
is this rank's alone and comes too late to stop the others: it is recorded, this rank goes on to the gathers, for which
others wait, and all ranks raise it with the statistics of the next step.

**Between the halves** the caller leaves gradients alone. In an undivided step nothing can have changed, and nothing is
collected twice. Otherwise :meth:`StepRecipe.apply` collects gradients again, so that a kernel is given no address that
has moved; it takes those that it finds, with the decision of those that were measured. ``zero_grad()`` and loaded state
discard the decision.
"""

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import InnerStepError, UsageError, listed
from megascale.grad_scaler import MegatronGradScaler
from megascale.grad_sync.sync import GradSync
from megascale.kernels import Decision, Statistic
from megascale.kernels.decision import StepDecision
from megascale.main_params.main_param import MainParam
from megascale.parallel import AssumedAlone, ParallelGroups
from megascale.step import grad_stats
from megascale.step.deferred_errors import DeferredErrors
from megascale.step.facts import FactsOfSteps
from megascale.step.grad_stats import GradStats
from megascale.step.local_grads import Collected
from megascale.step.main_grads import LentGrads, require_lendable
from megascale.step.member import StepMember
from megascale.step.misuse import (
    BUILD_LAST,
    JoinGuard,
    Statistics,
    differing_replicas,
    has_only_zeros,
    have_replicas_parted,
    parted_replicas,
    require_values,
    unscaled_loss_error,
    was_skipped,
)
from megascale.step.overflows import OverflowRecorder
from megascale.step.result import CapturedStep, StepObserver, StepRecord, StepResult
from megascale.step.stalls import StallWatch
from megascale.step.update import OverflowFlags
from megascale.utils.calls import span
from megascale.utils.collectives import all_gather_object, all_reduce_sum_, raising_together
from megascale.utils.transfer import is_capturing, to_device_async


class StepRecipe:
    """One step of one or more members under one decision: all of them update, or none.

    Its methods run under ``torch.no_grad()``, which the optimizer's own methods have entered.

    Args:
        members: on one device, with one ``groups.grad_stats``.
        groups: of the members; the ranks of ``grad_stats`` decide together.
        grad_scaler: of the loss; None: it is not scaled.
        clip_grad: largest norm of the unscaled gradients of all members together; 0: no clipping.
        grads_are_scaled: the caller guarantees gradients of a scaled loss, though the scale is not read here.

    Attributes:
        last_result: of the newest step or replay, what :meth:`apply` returned; None before the first.
        grad_scaler: of the loss, or None; see :meth:`set_grad_scaler`.
        device: where decisions live.
        overflows: keeps what a report of the last skipped step needs.
        observers: are told of each step, in this order, after it was decided on.
    """

    def __init__(
        self,
        members: Sequence[StepMember],
        groups: ParallelGroups,
        grad_scaler: MegatronGradScaler | None,
        clip_grad: float,
        *,
        grads_are_scaled: bool = False,
    ) -> None:
        self.members = list(members)
        self.groups = groups
        self.device = members[0].device
        self.clip_grad = clip_grad
        self.errors = DeferredErrors(groups, self.device)
        self._facts = FactsOfSteps(members, groups)
        self._join_guard = JoinGuard()
        self.grads_are_scaled = grads_are_scaled
        self.last_result: StepResult | None = None
        self.overflows = OverflowRecorder(members, groups)
        self._most_norm = members[0].config.grad_norm_skip_threshold
        watch = StallWatch(members, self.overflows, sees_spikes=self._most_norm != math.inf)
        self.observers: list[StepObserver] = [watch]
        self._backend = members[0].backend
        self._has_trained = False
        self.set_grad_scaler(grad_scaler)

    def set_grad_scaler(self, grad_scaler: MegatronGradScaler | None) -> None:
        """Scale the loss by another scaler from the next step on. Only reads of its scale from now on count."""
        self.grad_scaler = grad_scaler
        self._times_asked = 0 if grad_scaler is None else grad_scaler.times_asked

    # Both halves

    def step(self, error: Exception | None = None) -> StepResult:
        """Take a step: the one that :meth:`prepare` has left, where there is one.

        It is there on all ranks, or on none: a step that is decided exchanges no statistics again.
        """
        if self.decision is not None:
            return self.apply()
        collected, decision = self._decided(error, self.clip_grad)
        return self._take(collected, decision)

    # The first half

    def prepare(self, error: Exception | None = None, clip_grad: float | None = None) -> StepDecision:
        """Decide on a step, and keep it ready for :meth:`step` or :meth:`apply`.

        Args:
            error: what this rank found already; all ranks raise it.
            clip_grad: largest norm in this step, in place of :attr:`clip_grad`.
        """
        if self.decision is not None:
            error = error or UsageError(
                "prepare_grads() has measured these gradients already, and updated the loss scale: take the step that "
                "it decided with step_with_ready_grads() or step(), or call optimizer.zero_grad() before the next "
                "backward"
            )
        collected, decision = self._decided(error, self.clip_grad if clip_grad is None else clip_grad)
        for member, own in zip(self.members, collected, strict=True):
            member.ready = own, decision
        return decision

    def _decided(self, error: Exception | None, clip_grad: float) -> tuple[list[Collected], StepDecision]:
        """Finish, measure, agree, decide, rescale. Returns what each member will update, and the step's decision."""
        error = self._check() or error
        scaler, scaled = self.grad_scaler, self._is_loss_scaled()
        if not scaled and self.errors.consensus.is_alone:
            error = error or unscaled_loss_error()
        # In here an error is counted, never raised: the other ranks wait for this one.
        collected, stats = self._measure_and_agree(error, clip_grad, scaled=scaled)
        with span("megascale.decide"):
            scale = None if scaler is None else scaler.live_scale
            decision = self._backend.decide(stats.vector, scale, clip_grad, self._most_norm)
        # Before the loss scale changes: a step that is refused here leaves it as it was. In a capture nothing is known.
        capturing = is_capturing(self.device)
        agreed = None if capturing else self.errors.raise_agreed(stats.vector)
        self._observe(agreed, self.overflows.record(collected, stats, decision.found_inf, scaler, capturing=capturing))
        # Observers may raise, too, so that the scale, which is state, changes after them.
        with span("megascale.rescale"):
            if scaler is not None:
                scaler.update(decision.overflow)
                self._times_asked = scaler.times_asked
        return collected, decision

    @property
    def decision(self) -> StepDecision | None:
        """What :meth:`prepare` decided, until :meth:`apply`; else None, also where a member's step was dropped."""
        first = self.members[0].ready
        if first is None or any(member.ready is None or member.ready[1] is not first[1] for member in self.members):
            return None
        return first[1]

    def clip_values_(self, max_value: float) -> None:
        """Clamp a ready step's gradients, which stay scaled, to what is ±max_value when unscaled and norm-clipped."""
        ready, decision = self._ready("clip_grad_value_() needs prepare_grads() first, which decides the coefficient")
        for update in chain.from_iterable(own.updates for own in ready):
            for _, grad in update.pairs():
                bound = to_device_async(max_value / decision.coefficient, grad.device)
                torch.clamp(grad, -bound, bound, out=grad)

    # The second half

    def apply(self) -> StepResult:
        """Update and gather, where the step lands. All members are updated before an error is raised.

        An error here is this rank's alone. Others wait for its gathers, so it takes part in them, and all ranks raise
        the error at the next step.
        """
        if (fault := self._check()) is not None:
            raise fault  # nobody waits for this rank yet, and the chain can still take its step
        ready, decision = self._ready("step_with_ready_grads() needs prepare_grads() first; step() calls both")
        # With the gradients that are there now: no kernel is given an address that has moved.
        collected = [*map(StepMember.collect, self.members)]
        error = next((own.error for own in collected if own.error is not None), None)
        if unmeasured := [
            param.name
            for own, before in zip(collected, ready, strict=True)
            if own.params is not before.params  # else nothing was taken in since, and there is nothing to go through
            for measured in [set(before.params)]
            for param in own.params
            if param not in measured
        ]:
            error = error or UsageError(
                f"parameter {listed(unmeasured)} was added or unfrozen after prepare_grads() had measured gradients: "
                "call zero_grad(), and begin the step anew"
            )
        if error is not None:
            if self.errors.consensus.is_alone:
                raise error  # nothing has changed
            self.errors.record(error)  # not before: raised at once, it must not be raised by the next step again
            for member, own in zip(self.members, ready, strict=True):
                for update in own.updates:
                    member.main_params.mark_written(update.unit)  # other ranks gather it from this one
            collected = [replace(own, updates=[]) for own in ready]
        return self._take(collected, decision)

    def _take(self, ready: Sequence[Collected], decision: StepDecision) -> StepResult:
        """Take a decided step, whose tensors cannot have changed since they were checked."""
        self.discard_prepared()  # first: whatever the update raises, no step may be taken twice
        with span("megascale.update"):
            self.errors.record_overflows(self._apply_members(ready, decision))
        on_host = not is_capturing(self.device)  # a captured step on the device only: the host counts its replays
        for member in self.members:
            member.counter.count(decision.success, on_host=on_host)
        with span("megascale.gather"):  # or start the gather that modules wait for
            for member in self.members:
                member.main_params.end_step()
        self.errors.raise_local()  # last: this rank takes part in every gather, despite an error
        self.last_result = StepResult(decision.success, decision.grad_norm, decision.num_zeros)
        return self.last_result

    def discard_prepared(self) -> None:
        """Drop a step that was decided on and not taken; called when main params were replaced, too."""
        for member in self.members:
            member.ready = None

    def start_anew(self, *, is_whole: bool) -> None:
        """Forget the step that was prepared and recorded errors; called when state was replaced.

        ``is_whole``: all of it was, so that nothing is left of an update that has failed.
        """
        self.discard_prepared()
        self.reset_errors()
        for member in self.members:
            member.release_captured()
        for member in self.members if is_whole else ():
            member.update.forget_failure()

    def reset_errors(self) -> None:
        """Count a replacement of main params, and forget recorded errors."""
        self.errors.times_replaced += 1
        self.errors.clear()
        for member in self.members:
            member.main_params.written_too_early.clear()
        for observer in self.observers:
            observer.reset()

    # For methods of wrapped optimizers besides step()

    def grads_to_lend(self, error: Exception | None) -> LentGrads:
        """Finish, measure, agree and decide as :meth:`prepare` does, but clip and rescale nothing, and count no step.

        The host waits for the statistics. ``error``: what this rank found already; all ranks raise it.
        """
        error, scaled = self._check() or error, self._is_loss_scaled()
        try:
            for member in self.members:
                require_lendable(member, with_grads=True)
        except UsageError as caught:
            error = error or caught
        collected, stats = self._measure_and_agree(error, self.clip_grad, scaled=scaled, call="main_grads()")
        agreed = stats.vector.tolist()  # the host waits
        self.errors.raise_counted(agreed)
        if not has_only_zeros(agreed):  # zeros fit every loss scale
            self._require_sound(agreed, zip((own.params for own in collected), stats.sum_squares, strict=True))
        scale = None if self.grad_scaler is None else self.grad_scaler.live_scale
        pairs = (update.pairs() for own in collected for update in own.updates)
        grads = {id(param): grad for param, grad in chain.from_iterable(pairs)}
        return LentGrads(grads, self._backend.decide(stats.vector, scale, 0.0), was_skipped(agreed))

    def no_grads_to_lend(self, members: Sequence[StepMember]) -> LentGrads:
        """Return what :meth:`grads_to_lend` does where there are no gradients. All ranks raise what one has found."""
        with raising_together(self.groups.grad_stats):
            self._check()  # a chain's optimizers may each be lent alone: nothing is decided on
            for member in members:
                require_lendable(member, with_grads=False)
                member.sync_from_model()
                member.update.require_usable_state(member.main_params)
        zero = torch.zeros((), device=members[0].device)
        return LentGrads({}, Decision(zero, torch.ones_like(zero), zero, zero), overflowed=False)

    # For a graph that holds the step

    @torch.no_grad()
    def rehearse(self) -> None:
        """Run the device work of a step; only reduced gradients change.

        This compiles and loads kernels and creates buffers, which is impossible while a graph is captured.
        """
        collected, stats = self._measure_and_agree(None, self.clip_grad, scaled=True)
        scale = None if self.grad_scaler is None else self.grad_scaler.live_scale
        decision = self._backend.decide(stats.vector, scale, self.clip_grad, self._most_norm)
        skip = replace(decision, found_inf=torch.ones_like(decision.found_inf))
        if self.grad_scaler is not None:
            self.grad_scaler.rehearse(skip.found_inf)
        self.errors.record_overflows(self._apply_members(collected, skip))
        self.errors.clear()
        for member in self.members:
            if isinstance(member.grad_sync, GradSync):
                member.grad_sync.in_step_graph = True
            member.counter.count(torch.zeros_like(skip.success), on_host=False)
            member.main_params.end_step()

    def captured(self) -> CapturedStep:
        """Return what a graph must keep of the step that was captured last."""
        if (record := self.overflows.newest) is None:
            raise LookupError("no step yet")
        captured = CapturedStep(
            record,
            self.errors.flags[-1],
            self.last_result,
            self._settings(),
            [member.main_params.times_arranged for member in self.members],
            [storage for member in self.members for storage in member.captured_memory()],
        )
        for member in self.members:
            member.captured.add(captured)
        return captured

    def _settings(self) -> dict[str, object]:
        """Return what a graph cannot read anew, by name."""
        settings: dict[str, object] = {"clip_grad": self.clip_grad, "grad_scaler": self.grad_scaler}
        for member in self.members:
            for index, group in enumerate(member.optimizer.param_groups):
                names = member.optimizer.defaults.keys() - {"lr"}
                settings.update((f"{name} of param group {index}", group.get(name)) for name in names)
        return settings

    def before_replay(self, captured: CapturedStep, *, all_of_it: bool) -> None:
        """Take over weights loaded into the model, before a replay is launched.

        Raises UsageError if the library has moved state; if weights were written, or with ``all_of_it``, also if any
        tensor that the step updates is elsewhere.
        """
        if (
            all_of_it
            or not captured.memory
            or any(member.main_params.tracker.have_new_versions() for member in self.members)
        ):
            self._require_in_place(captured)

    def _require_in_place(self, captured: CapturedStep) -> None:
        """Take over writes to weights and state. Raises UsageError where a replay would read or write other memory."""
        for member, arranged in zip(self.members, captured.times_arranged, strict=True):
            member.main_params.residence.require_here("a graph's replay")
            member.sync_from_model()
            # Units are made anew where parameters have moved. State that is taken in now is not what a replay has read.
            member.main_params.units()
            have_moved = member.update.take_in_state() or member.main_params.times_arranged != arranged
            if have_moved or not captured.memory:
                raise UsageError(
                    "parameters or optimizer state have moved since the graph was captured (added, loaded, or moved to "
                    "another device); make a new StepGraph"
                )

    def after_replay(self, captured: CapturedStep) -> None:
        """Compare what the graph holds, while the device works. Raise errors one step late, as on any accelerator."""
        for member in self.members:
            member.counter.steps += 1
        self.last_result = captured.result
        agreed = self.errors.raise_agreed(captured.record.vector)
        self.errors.flags.append(captured.overflow_flags)
        self.overflows.losses.take()
        self._observe(agreed, captured.record)
        self._require_in_place(captured)
        settings = self._settings()
        for name, value in captured.settings.items():
            if settings.get(name) != value:
                raise UsageError(
                    f"{name} was {value!r} when the step was captured into a graph, and is {settings.get(name)!r} now, "
                    "which replays do not read: set it back, or make a new StepGraph"
                )

    # Parts

    def _check(self) -> UsageError | None:
        """Raise UsageError where no step can be computed; return one if a chain steps these members with others.

        All ranks find the first alike. The second may be found by one rank alone, and the others would wait for it.
        """
        require_values(self.device)
        is_begun = isinstance(self.groups, AssumedAlone) and dist.is_available() and dist.is_initialized()
        if is_begun and dist.get_world_size() > 1:
            raise UsageError(
                "the optimizer was built before torch.distributed.init_process_group(), for this rank alone, and now "
                f"there are {dist.get_world_size()} ranks: build it afterwards, or, where each rank trains a model of "
                "its own, pass groups=ParallelGroups()"
            )
        if not self.errors.consensus.is_alone:
            self._join_guard.check(param.model for member in self.members for param in member.main_params)
        for member in self.members:
            if member.chain is not None and member.chain() not in (None, self):
                gc.collect()  # a chain that only a reference cycle keeps counts as dropped
                if member.chain() is not None:
                    names = listed([param.name for param in member.main_params])
                    return UsageError(
                        f"the optimizer of {names} is in a ChainedOptimizer, which takes one decision for all of its "
                        "optimizers: call step(), prepare_grads() and clip_grad_norm_() of the ChainedOptimizer that "
                        "was built last; to step this optimizer by itself, drop that one first (del)"
                    )
        return None

    def _is_loss_scaled(self) -> bool:
        """Return whether the gradients can be those of a scaled loss, as far as this rank knows.

        In a pipeline only the last stage has a loss. Optimizers that share a scaler each count its reads for
        themselves.
        """
        scaler = self.grad_scaler
        if scaler is None or self.grads_are_scaled:
            return True
        return scaler.times_asked != self._times_asked or not scaler.needs_scaled_loss

    def _measure_and_agree(
        self, error: Exception | None, clip_grad: float, *, scaled: bool, call: str = "step()"
    ) -> tuple[list[Collected], GradStats]:
        """Return what each member will update, and statistics of all of it: all ranks' vector, this rank's counts.

        Args:
            error: what this rank found already.
            clip_grad: largest norm; all ranks must have the same.
            scaled: whether the gradients can be those of a scaled loss.
            call: what they are measured for; all ranks must make the same.
        """
        with span("megascale.finish"):
            collected = [*map(StepMember.collect, self.members)]
        with span("megascale.measure"):
            for own in reversed(collected):  # the first member's error goes before the others'
                error = own.error or error
            # A rank with an error writes no facts down: they read what the error may be about, and must not raise.
            facts = None
            if not self.errors.consensus.is_alone and error is None:
                facts = self._facts.of_step(collected, clip_grad, self.grad_scaler, self.errors.times_replaced, call)
            count, measured = self.errors.as_statistic(error, facts), list[GradStats]()
            for member, own in zip(self.members, collected, strict=True):
                measured.append(member.measure(own, count, scaled))
                count = self.errors.no_errors  # counted once, however many members this rank has
            stats = measured[0] if len(measured) == 1 else grad_stats.combined(measured)
        with span("megascale.agree"):
            if not self.errors.consensus.is_alone:
                # The one collective of the decision.
                stats = replace(stats, vector=all_reduce_sum_(stats.vector, self.groups.grad_stats))
        return collected, stats

    def _observe(self, agreed: Statistics | None, record: StepRecord) -> None:
        """Raise for misuse that the host now knows of, or tell the observers of a step.

        Args:
            agreed: the statistics that the host knows: on a CPU this step's, else those of the step before.
            record: of this step.
        """
        reported = record if self.errors.on_host else self.overflows.newest
        overflowed = False
        if agreed is not None:
            kept = reported is not None and reported.step is not None  # else a newer replay may have overwritten them
            measured = zip(reported.params, reported.sum_squares, strict=True) if reported is not None and kept else ()
            self._require_sound(agreed, measured)
            overflowed = was_skipped(agreed)
        self.overflows.newest = record
        if overflowed and reported is not None:
            self.overflows.on_skip(reported)  # before observers, which ask which parameters overflowed
        for observer in self.observers:
            observer.on_step(agreed, record, overflowed=overflowed)

    def _require_sound(self, agreed: Statistics, measured: Iterable[tuple[Sequence[MainParam], Tensor | None]]) -> None:
        """Raise UsageError for gradients that never were there, of an unscaled loss, or that differ between replicas.

        ``measured``: of each member the parameters and sums of squares of these gradients, where they are kept.
        """
        error: UsageError | None = None
        if agreed[Statistic.SCALED] <= 0:
            error = unscaled_loss_error()
        # Every gradient was None, on every rank: see WITH_GRADS. Later steps may be empty; an error leaves the flag, so
        # that the step after it is the first one.
        elif not self._has_trained and agreed[Statistic.SCALED].is_integer():
            error = UsageError(
                "no parameter of the optimizer has a gradient, on any rank, in its first step, which would train "
                f"nothing: {BUILD_LAST}. Else backward() was not called, the loss does not depend on the parameters, "
                "or all are frozen"
            )
        elif not self.errors.consensus.is_alone and have_replicas_parted(agreed):
            of_members = zip(self.members, measured, strict=False)
            mine = [member.grads.replica_squares(*params_and_squares) for member, params_and_squares in of_members]
            every = all_gather_object(dict(chain.from_iterable(map(dict.items, mine))), self.groups.grad_stats)
            error = parted_replicas(differing_replicas(every))
        if error is not None:
            self.errors.view.flush()
            raise error
        self._has_trained = True

    def _apply_members(self, ready: Sequence[Collected], decision: Decision) -> list[OverflowFlags]:
        """Update all members. Returns which main params did not fit their model params."""
        overflow_flags: list[OverflowFlags] = []
        for member, own in zip(self.members, ready, strict=True):
            try:
                overflow_flags += member.update.apply(own.updates, decision, member.main_params.mark_written)
            except InnerStepError as error:
                self.errors.record(error)
        return overflow_flags

    def _ready(self, without: str) -> tuple[list[Collected], StepDecision]:
        """Return the members' ready steps, and the decision. Raises UsageError saying ``without`` if there are none."""
        decision = self.decision
        if decision is None:
            raise UsageError(without)
        return [member.ready[0] for member in self.members if member.ready is not None], decision
