"""Facts of a step: what ranks must do alike in it, written down for :mod:`megascale.step.consensus`.

Ranks that hold the same parameters share options, which parameters take them, which take part, the clip, what a config
asks of every step, divisors, how the optimizer updates, and the number of steps taken. Ranks that decide together share
the loss scale and its rule, whatever they hold: gradients cross from one to another, and are divided by one scale.

Of tensors only those in host memory are compared: the host waits for no device.
"""

import operator
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import chain
from typing import Any

from megascale.config import StepConfig
from megascale.grad_scaler import MegatronGradScaler
from megascale.grad_sync.sync import GradSync
from megascale.main_params.main_param import MainParam
from megascale.parallel import ParallelGroups, is_expert
from megascale.step.consensus import Kind, StepFacts
from megascale.step.local_grads import Collected
from megascale.step.member import StepMember
from megascale.utils.collectives import group_ranks
from megascale.utils.comparable import comparable, number_in
from megascale.utils.consensus import Facts

_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Options that say which parameters there are, and how a step is computed: where that decides about bits, the update's
``update_signature()`` tells of it."""
_BESIDE_DEFAULTS = ("decoupled_weight_decay",)
"""Options that a step reads although not every optimizer has them among its defaults."""
_LEFT_OUT = "that it is frozen, without a gradient or in no param group"


class FactsOfSteps:
    """Writes down this rank's facts of each step.

    Args:
        members: of the steps.
        groups: of all members.
    """

    def __init__(self, members: Sequence[StepMember], groups: ParallelGroups) -> None:
        holders = [""] if len(members) == 1 else [f"optimizers[{index}]." for index in range(len(members))]
        self._members = list(zip(members, holders, strict=True))
        self._groups = groups
        # Configs are frozen.
        self._configs = {
            f"{holder}config.{field.name}": comparable(value) if type(value) in (int, float) else value
            for member, holder in self._members
            for field in fields(StepConfig)
            for value in [getattr(member.config, field.name)]
        }
        self._ordered: list[list[list[MainParam]]] = []
        self._param_groups: dict[bool, dict[str, Any]] = {}

    def of_step(
        self,
        collected: Sequence[Collected],
        clip_grad: float,
        scaler: MegatronGradScaler | None,
        times_replaced: int,
        call: str,
    ) -> StepFacts:
        """Return the present facts.

        Args:
            collected: what each member will update.
            clip_grad: largest norm of the gradients.
            scaler: of the loss.
            times_replaced: how often main params were loaded, or reloaded from the model.
            call: what gradients are measured for.
        """
        facts: dict[Kind, Sequence[Facts]] = {
            None: [
                {
                    "grad_scaler (its rule, and the state that was loaded)": scaler and comparable(scaler.settings()),
                    "the loss scale": scaler and number_in(scaler.live_scale),  # where that lies in host memory
                }
            ]
        }
        # First the parameters that this rank leaves out.
        left_out: dict[bool, dict[str, Any]] = {}
        for (member, _), own in zip(self._members, collected, strict=True):
            for name, param in member.absent(own).items():
                left_out.setdefault(is_expert(param), {})[f"the reason to leave {name!r} out of the step"] = _LEFT_OUT
        options, may_differ = self._options(), any(member.replicas_may_differ for member, _ in self._members)
        for experts in (False, True):  # replicas that may differ say no more than that
            facts[experts] = [{"replicas_may_differ": may_differ, **left_out.get(experts, {})}]
        if not may_differ:
            self._find_groups()
            counts = {
                "the call": call,
                "the number of times that main params were loaded or reloaded": times_replaced,
                "the number of steps taken": [member.counter.taken for member, _ in self._members],
            }
            shared = {"clip_grad": comparable(clip_grad), **self._configs}
            for member, holder in self._members:
                sync, divisor = member.grad_sync, f"the divisor given to {holder}grad_sync.set_divisor()"
                shared[divisor] = comparable(sync.divisor if isinstance(sync, GradSync) else None)
                # Backends, and an optimizer's own step(), round differently. No two ranks update one element of shards.
                arithmetic = None if member.main_params.is_sharded else member.update.update_signature()
                shared[f"how {holder or 'the '}optimizer updates"] = arithmetic
            for experts, theirs in options.items():
                facts[experts] = [*facts[experts], self._param_groups.get(experts, {}), counts, {**shared, **theirs}]
        return facts

    def _find_groups(self) -> None:
        """Find anew which param groups hold which parameters, if a list of a member's parameters is another one."""
        ordered = [member.main_params.ordered for member, _ in self._members]
        if len(ordered) == len(self._ordered) and all(map(operator.is_, ordered, self._ordered)):
            return
        self._ordered, self._param_groups = ordered, {}
        for index, params in enumerate(chain.from_iterable(ordered)):
            for param in params:
                # A name that is a position may be any: its shape tells more.
                shape = f"parameters of shape {tuple(param.model.shape)}"
                label = f"the param group of {shape if param.name.isdecimal() else repr(param.name)}"
                self._param_groups.setdefault(is_expert(param.model), {}).setdefault(label, []).append(index)
        for experts, facts in self._param_groups.items():
            ranks = "expert_data_parallel" if experts else "data_parallel"
            facts[f"groups.{ranks}"] = group_ranks(getattr(self._groups, ranks))

    def _options(self) -> dict[bool, dict[str, Any]]:
        """Return the options of all param groups, for dense parameters and for experts, as far as there are any."""
        found: dict[bool, dict[str, Any]] = {}
        optimizers = [member.optimizer for member, _ in self._members]
        groups = ((optimizer.defaults, group) for optimizer in optimizers for group in optimizer.param_groups)
        for index, (defaults, group) in enumerate(groups):
            if group["params"]:
                own = found.setdefault(is_expert(group["params"][0]), {})
                for name in (*defaults, *_BESIDE_DEFAULTS):
                    if name not in _NOT_COMPARED:
                        own[_option(name, index)] = comparable(group.get(name))
        return found


@lru_cache(maxsize=4096)
def _option(name: str, index: int) -> str:
    return f"{name} of param group {index}"
