"""Settings that ranks which hold the same parameters must share, and those of all ranks that decide together.

Ranks that hold the same parameters share options, which parameters take them, the clip, what a config asks of every
step, divisors, how the optimizer updates, and the number of steps taken. Ranks that decide together share the loss
scale and its rule, whatever they hold: gradients cross from one to another, and are divided by one scale.

Ranks with the same gradients and other learning rates would part. So each rank adds a number to its count of errors, as
:mod:`megascale.step.absence` does: they add up to 0 where the settings are the same, and otherwise do not, but for one
case in a million; in the next step the numbers are others. No collective is added. Of tensors only those in host memory
are compared: the host waits for no device.
"""

import numbers
import operator
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megascale.config import OptimizerConfig
from megascale.errors import UsageError
from megascale.grad_scaler import MegatronGradScaler
from megascale.grad_sync.sync import GradSync
from megascale.kernels import stats_dtype
from megascale.main_params.main_param import MainParam
from megascale.parallel import ParallelGroups, is_expert
from megascale.step.absence import LARGEST, cancelling
from megascale.step.member import StepMember
from megascale.utils.collectives import all_gather_object, group_rank, group_ranks, group_size

Settings = tuple[Any, ...]
"""Of one kind of parameters: the clip, each member's config, a digest of which parameters each param group holds, and
for each param group its names and values. Of all: the scaler's rule and its scale.
"""

Kind = bool | None
"""Whose settings: False those of dense parameters, True those of experts, None those of all ranks that decide together.
"""

_PARAM_GROUP_OF = "the param group of "

GroupsOf = Mapping[str, tuple[int, ...]]
"""The param groups that hold a parameter, by its name; of parameters that are known by position only, by shape."""

_MAY_DIFFER = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options that choose how a step is computed."""

_OF_EVERY_STEP = (
    "log_num_zeros_in_grad",
    "grad_norm_skip_threshold",
    "zclip",
    "zclip_z_thresh",
    "zclip_alpha",
    "zclip_warmup_steps",
    "max_consecutive_skips",
    "max_overflows_at_min_scale",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "store_param_remainders",
    "muon_split_work",
)
"""Fields of a config that a step reads. The others made objects that are compared."""


class SharedSettings:
    """Compares settings between ranks, and the number of steps that they have taken, without asking them.

    Args:
        groups: of all members.
        device: of the statistics.
    """

    def __init__(self, groups: ParallelGroups, device: torch.device) -> None:
        self._groups = groups
        # Products with the factors of ranks, and sums of these, are exact in the statistics' dtype.
        self._num_digests = 1 << 20 if stats_dtype(device) == torch.float64 else LARGEST
        self._is_alone = group_size(groups.grad_stats) == 1
        # Of this step and the one before, as the host learns of a difference one step late on an accelerator.
        self._recent: deque[tuple[tuple[int, ...], dict[Kind, Settings]]] = deque(maxlen=2)
        self._holders: dict[Kind, ProcessGroup | None] = {None: groups.grad_stats}
        self._digests: dict[Kind, int] = {}
        self._configs: tuple[tuple[Any, ...], ...] | None = None
        self._times_replaced = 0
        self._ordered: list[list[list[MainParam]]] = []
        self._groups_of: dict[Kind, GroupsOf] = {}
        self._membership: dict[Kind, int] = {}

    def count_replaced(self) -> None:
        """Count that main params were loaded, or reloaded from the model: all ranks must do it."""
        self._times_replaced += 1

    def pass_over(self) -> None:
        """Take note of a step in which this rank has an error, and reads no settings."""
        self._recent.append(((), {}))

    def number(self, members: Sequence[StepMember], clip_grad: float, scaler: MegatronGradScaler | None) -> int:
        """Return this rank's number for the present settings: 0 where it is alone."""
        if self._is_alone:
            return 0
        now: dict[Kind, Settings] = {None: _of_scaler(scaler)}
        if not any(member.replicas_may_differ for member in members):
            now |= self._read(members, clip_grad)
        if not self._recent or self._recent[-1][1] != now:
            self._digests = {kind: zlib.crc32(repr(settings).encode()) for kind, settings in now.items()}
        taken = (self._times_replaced, *(member.counter.taken for member in members))
        self._recent.append((taken, now))
        seed = repr(taken).encode()
        # Ranks with other parameters may have taken other numbers of steps.
        seeded = {kind: zlib.crc32(b"" if kind is None else seed, digest) for kind, digest in self._digests.items()}
        return sum(self._share(kind, digest) for kind, digest in seeded.items())

    def _read(self, members: Sequence[StepMember], clip_grad: float) -> dict[Kind, Settings]:
        """Return the settings of dense parameters and those of experts, as far as there are any."""
        if self._configs is None:  # they are frozen
            self._configs = tuple(_fields(member.config) for member in members)
        self._find_groups(members)
        head = (_comparable(clip_grad), self._configs, tuple(map(_changing, members)))
        found: dict[Kind, Settings] = {}
        for member in members:
            names = [name for name in member.optimizer.defaults if name not in _MAY_DIFFER]
            for group in member.optimizer.param_groups:
                if not group["params"]:
                    continue
                first = group["params"][0]
                kind = is_expert(first)
                if kind not in self._holders:
                    self._holders[kind] = self._groups.of_param(first).holders
                values = tuple(_comparable(group.get(name)) for name in names)
                own = (*head, self._membership.get(kind))
                found[kind] = (*found.get(kind, own), (tuple(names), values))
        return found

    def _find_groups(self, members: Sequence[StepMember]) -> None:
        """Find anew which param groups hold which parameters, if a list of a member's parameters is another one."""
        ordered = [member.main_params.ordered for member in members]
        if len(ordered) == len(self._ordered) and all(map(operator.is_, ordered, self._ordered)):
            return
        self._ordered = ordered
        found: dict[bool, dict[str, list[int]]] = {True: defaultdict(list), False: defaultdict(list)}
        for index, params in enumerate(chain.from_iterable(ordered)):
            for param in params:
                found[is_expert(param.model)][_known_as(param)].append(index)
        self._groups_of = {
            kind: {name: tuple(sorted(indices)) for name, indices in of_kind.items()} for kind, of_kind in found.items()
        }
        self._membership = {
            kind: zlib.crc32(repr(sorted(groups_of.items())).encode()) for kind, groups_of in self._groups_of.items()
        }

    def _share(self, kind: Kind, digest: int) -> int:
        holders = self._holders[kind]
        return (digest % self._num_digests + 1) * cancelling(group_size(holders))[group_rank(holders)]

    def error(self, *, missing: bool = False) -> UsageError | None:
        """Return the error that names a setting which differs between ranks, if any. All ranks call it together.

        ``missing``: name parameters that only some ranks have in a param group, too.
        """
        mine = {
            (kind, group_ranks(holders)): [
                dict(self._labelled(kind, taken, own[kind])) if kind in own else {} for taken, own in self._recent
            ]
            for kind, holders in self._holders.items()
            if group_size(holders) > 1
        }
        first: dict[Any, tuple[int, list[dict[str, Any]]]] = {}
        for rank, theirs in enumerate(all_gather_object(mine, self._groups.grad_stats)):
            for key, steps in theirs.items():
                first_rank, first_steps = first.setdefault(key, (rank, steps))
                found = _first_difference(first_steps, steps, missing=missing)
                if found is not None:
                    return _difference_error(key[0], found, first_rank, rank)
        return None

    def _labelled(self, kind: Kind, taken: tuple[int, ...], settings: Settings) -> Iterator[tuple[str, Any]]:
        if kind is None:
            return zip(
                ("grad_scaler (its rule, and the state that was loaded)", "the loss scale"), settings, strict=True
            )
        return _labelled(taken, settings, self._groups_of[kind])


def _difference_error(kind: Kind, difference: tuple[str, Any, Any], first_rank: int, rank: int) -> UsageError:
    label, one, other = difference
    values = f"{label} is {one!r} on rank {first_rank} and {other!r} on rank {rank}"
    if kind is None:
        return UsageError(
            f"ranks that decide together have other loss scales, or not all of them have one: {values}; give each the "
            "same scaler, load the same scaler state on each, or leave out of groups.grad_stats what trains on its own"
        )
    return UsageError(
        f"ranks that hold the same parameters have other settings: {values}; set it alike on every rank, or, where "
        "their parameters are meant to part, pass replicas_may_differ=True to MixedPrecisionOptimizer"
    )


def _first_difference(
    mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], *, missing: bool
) -> tuple[str, Any, Any] | None:
    """Return what a setting is called that differs in the same step, and both values; None if all are the same."""
    for one, other in zip(mine, theirs, strict=False):
        if not one or not other:  # a rank had an error in that step
            continue
        for label in dict.fromkeys((*one, *other)):
            is_missing = label.startswith(_PARAM_GROUP_OF) and not (label in one and label in other)
            if is_missing and not missing:
                continue
            if repr(one.get(label)) != repr(other.get(label)):  # as digests compare them
                return label, one.get(label), other.get(label)
    return None


def _of_scaler(scaler: MegatronGradScaler | None) -> Settings:
    """Return the rule of a scaler, and its scale where that lies in host memory."""
    return (None, None) if scaler is None else (_comparable(scaler.settings()), _number_in(scaler.live_scale))


def _fields(config: OptimizerConfig) -> tuple[Any, ...]:
    values = (getattr(config, name) for name in _OF_EVERY_STEP)
    return tuple(_comparable(value) if type(value) in (int, float) else value for value in values)


def _changing(member: StepMember) -> tuple[Any, ...]:
    """Return how a member updates, and the divisor of its gradients: settings that are in neither config nor options.

    Backends, and an optimizer's own ``step()``, round differently. Where ranks hold shards, no two of them update the
    same element.
    """
    sync = member.grad_sync
    divisor = sync.divisor if isinstance(sync, GradSync) else None
    return None if member.main_params.is_sharded else member.update.arithmetic(), _comparable(divisor)


def _comparable(value: Any) -> Any:
    """Return an option's value if it is numbers or words, in one form for equal ones; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Real):
        try:
            return float(value) + 0.0  # -0.0 becomes 0.0
        except OverflowError:  # an integer that is too large
            return repr(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    return _number_in(value) if isinstance(value, Tensor) else None


def _number_in(value: Tensor) -> float | str:
    """Return the number that a tensor holds in host memory; else where it is, as the host must not wait."""
    if value.device.type == "cpu" and value.numel() == 1:
        try:
            return float(value.detach().double().numpy().reshape(()))
        except (RuntimeError, TypeError):  # a tensor without memory of its own, such as a fake one
            pass
    return f"a tensor on {value.device.type}"


def _known_as(param: MainParam) -> str:
    """Return a parameter's name; where that is its position, which may be any, its shape."""
    return f"parameters of shape {tuple(param.model.shape)}" if param.name.isdecimal() else repr(param.name)


def _labelled(taken: tuple[int, ...], settings: Settings, groups_of: GroupsOf) -> Iterator[tuple[str, Any]]:
    """Yield what each setting is called, and its value. ``groups_of``: the present ones."""
    clip_grad, configs, changing, _, *groups = settings
    replaced, *steps = taken
    yield "the number of times that main params were loaded or reloaded", replaced
    yield "the number of steps taken", steps[0] if len(steps) == 1 else tuple(steps)
    yield "clip_grad", clip_grad
    for index, (config, (arithmetic, divisor)) in enumerate(zip(configs, changing, strict=True)):
        holder = "" if len(configs) == 1 else f"optimizers[{index}]."
        for name, value in zip(_OF_EVERY_STEP, config, strict=True):
            yield f"{holder}config.{name}", value
        yield f"the divisor given to {holder}grad_sync.set_divisor()", divisor
        yield f"how {holder or 'the '}optimizer updates", arithmetic
    for index, (names, values) in enumerate(groups):
        for name, value in zip(names, values, strict=True):
            yield f"{name} of param group {index}", value
    for name, indices in groups_of.items():
        yield f"{_PARAM_GROUP_OF}{name}", indices[0] if len(indices) == 1 else indices
