"""Facts of a step: what ranks must do alike in it, written down for :mod:`megascale.step.consensus`.

Ranks that hold the same parameters share options, which parameters take them, which take part, the clip, what a config
asks of every step, divisors, how the optimizer updates, and the number of steps taken. Ranks that decide together share
the loss scale and its rule, whatever they hold: gradients cross from one to another, and are divided by one scale.

Of tensors only those in host memory are compared, but for the first values of new parameters: the host waits for no
device.
"""

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import chain
from typing import Any

from megascale.config import StepConfig
from megascale.grad_scaler import MegatronGradScaler
from megascale.grad_sync.sync import GradSync
from megascale.main_params.main_param import MainParam
from megascale.main_params.replica_check import digests
from megascale.parallel import ParallelGroups, is_expert
from megascale.step.consensus import Kind, StepFacts, Topic
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
_STEP_FIELDS = tuple(one.name for one in fields(StepConfig))


class FactsOfSteps:
    """Writes down this rank's facts of each step.

    Args:
        groups: of all members.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self._configs: dict[str, Any] | None = None
        self._ordered: list[list[list[MainParam]]] = []
        self._param_groups: dict[Kind, Facts] = {}

    def of_step(
        self,
        members: Sequence[StepMember],
        collected: Sequence[Collected],
        clip_grad: float,
        scaler: MegatronGradScaler | None,
        times_replaced: int,
        call: str,
    ) -> StepFacts:
        """Return the present facts.

        Args:
            members: of the step.
            collected: what each member will update.
            clip_grad: largest norm of the gradients.
            scaler: of the loss.
            times_replaced: how often main params were loaded, or reloaded from the model.
            call: what gradients are measured for.
        """
        facts: dict[tuple[Kind, Topic], Facts] = {
            (None, Topic.SCALER): {
                "grad_scaler (its rule, and the state that was loaded)": scaler and comparable(scaler.settings()),
                "the loss scale": scaler and number_in(scaler.live_scale),  # where that lies in host memory
            }
        }
        absent = dict(
            chain.from_iterable(member.absent(own).items() for member, own in zip(members, collected, strict=True))
        )
        new = dict(chain.from_iterable(member.unverified_params.items() for member in members))
        # Of new parameters the values count: gradients, which tell replicas that differ, do not tell where they began.
        for topic, params, values in (
            (Topic.ABSENT, absent, dict.fromkeys(absent, True)),
            (Topic.NEW, new, digests(new) if new else {}),
        ):
            for experts in {is_expert(param) for param in params.values()}:
                facts[experts, topic] = {name: values[name] for name in params if is_expert(params[name]) == experts}
        may_differ = any(member.replicas_may_differ for member in members)
        options = _options(members)
        # This one does not vote, it explains: where only some ranks of a set vote, their numbers do not add up to 0.
        facts |= {(experts, Topic.REPLICAS): {"replicas_may_differ": may_differ} for experts in options}
        if not may_differ:
            self._find_groups(members)
            counts, shared = _counts(members, times_replaced, call), self._shared(members, clip_grad)
            for experts, own in options.items():
                facts[experts, Topic.COUNTS] = counts
                facts[experts, Topic.GROUPS] = self._param_groups.get(experts, {})
                facts[experts, Topic.SETTINGS] = {**shared, **own}
        return facts

    def _shared(self, members: Sequence[StepMember], clip_grad: float) -> dict[str, Any]:
        """Return the settings of all param groups."""
        if self._configs is None:  # they are frozen
            self._configs = {
                f"{holder}config.{name}": comparable(value) if type(value) in (int, float) else value
                for member, holder in zip(members, _holders(members), strict=True)
                for name, value in ((name, getattr(member.config, name)) for name in _STEP_FIELDS)
            }
        updates = dict(chain.from_iterable(map(_of_update, members, _holders(members))))
        return {"clip_grad": comparable(clip_grad), **self._configs, **updates}

    def _find_groups(self, members: Sequence[StepMember]) -> None:
        """Find anew which param groups hold which parameters, if a list of a member's parameters is another one."""
        ordered = [member.main_params.ordered for member in members]
        if len(ordered) == len(self._ordered) and all(map(operator.is_, ordered, self._ordered)):
            return
        self._ordered = ordered
        found: dict[bool, dict[str, list[int]]] = {True: defaultdict(list), False: defaultdict(list)}
        for index, params in enumerate(chain.from_iterable(ordered)):
            for param in params:
                # A name that is a position may be any: its shape tells more.
                shape = f"parameters of shape {tuple(param.model.shape)}"
                called = shape if param.name.isdecimal() else repr(param.name)
                found[is_expert(param.model)][f"the param group of {called}"].append(index)
        names = {False: "data_parallel", True: "expert_data_parallel"}
        self._param_groups = {
            experts: {
                **{label: own[0] if len(own) == 1 else tuple(sorted(own)) for label, own in of_kind.items()},
                f"groups.{names[experts]}": group_ranks(getattr(self._groups, names[experts])),
            }
            for experts, of_kind in found.items()
            if of_kind
        }


def _holders(members: Sequence[StepMember]) -> list[str]:
    """Return what a message puts before what belongs to each member."""
    return [""] if len(members) == 1 else [f"optimizers[{index}]." for index in range(len(members))]


def _counts(members: Sequence[StepMember], times_replaced: int, call: str) -> Facts:
    steps = [member.counter.taken for member in members]
    return {
        "the call": call,
        "the number of times that main params were loaded or reloaded": times_replaced,
        "the number of steps taken": steps[0] if len(steps) == 1 else tuple(steps),
    }


def _of_update(member: StepMember, holder: str) -> list[tuple[str, Any]]:
    """Return the divisor of a member's gradients, and how it updates: settings in neither config nor options.

    Backends, and an optimizer's own ``step()``, round differently. Where ranks hold shards, no two of them update the
    same element.
    """
    sync = member.grad_sync
    arithmetic = None if member.main_params.is_sharded else member.update.update_signature()
    return [
        (
            f"the divisor given to {holder}grad_sync.set_divisor()",
            comparable(sync.divisor if isinstance(sync, GradSync) else None),
        ),
        (f"how {holder or 'the '}optimizer updates", arithmetic),
    ]


def _options(members: Sequence[StepMember]) -> dict[bool, dict[str, Any]]:
    """Return the options of all param groups, for dense parameters and for experts, as far as there are any."""
    found: dict[bool, dict[str, Any]] = {}
    groups = ((member.optimizer.defaults, group) for member in members for group in member.optimizer.param_groups)
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
