"""Detects misuse: in who wraps and scales what, in a step's surroundings, and in its agreed statistics.

Every rank has the same statistics, so that all raise alike. An inner optimizer has one wrapper at a time, and a scaler
one user: such references are weak, so that an optimizer that is garbage-collected frees both.
"""

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megascale.errors import ArgumentError, UsageError, listed
from megascale.grad_scaler import MegatronGradScaler
from megascale.kernels import LARGEST_SUM_SQUARES, REPLICA_TOLERANCE, Statistic
from megascale.step.local_grads import ReplicaSet
from megascale.utils.live_objects import objects_of

BUILD_LAST = (
    "if it was built before fully_shard() or module.to_empty(), which replace parameters, or for another model, build "
    "it and its wrapper last, from the parameters of the model that is trained"
)
"""Why an optimizer has other parameters than the model, and the remedy."""

Statistics = Sequence[float]
"""Agreed statistics as host numbers, by :class:`megascale.kernels.Statistic`."""

_wrappers: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[torch.optim.Optimizer]] = WeakKeyDictionary()
_users: WeakKeyDictionary[MegatronGradScaler, WeakSet[torch.optim.Optimizer]] = WeakKeyDictionary()


def check_unwrapped(inner: torch.optim.Optimizer) -> None:
    """Raise ArgumentError if a live optimizer already wraps ``inner``: each would hold its own main params.

    A wrapper that only a reference cycle keeps counts as dropped.
    """
    if inner in _wrappers:
        gc.collect()
    wrapper = _wrappers[inner]() if inner in _wrappers else None
    if wrapper is not None:
        raise ArgumentError(
            f"optimizer ({type(inner).__name__}) is wrapped by a {type(wrapper).__name__} already, and two would keep "
            "two sets of main params for the same parameters; use that one, or drop it first (del, also of a schedule "
            "built on it)"
        )


def record(wrapper: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Remember, weakly, that ``wrapper`` wraps ``inner``."""
    _wrappers[inner] = ref(wrapper)


def record_user(wrapper: torch.optim.Optimizer, scaler: MegatronGradScaler) -> None:
    """Remember, weakly, that the steps of ``wrapper`` update ``scaler``."""
    _users.setdefault(scaler, WeakSet()).add(wrapper)


def scaler_conflict(
    scaler: MegatronGradScaler | None, stepping: Collection[torch.optim.Optimizer]
) -> UsageError | None:
    """Return an error if an optimizer that is not in ``stepping`` would update ``scaler`` too."""
    if scaler is None or scaler.may_be_shared or len(_users[scaler]) == len(stepping):
        return None
    gc.collect()  # an optimizer that only a reference cycle keeps counts as dropped
    using = [user for user in _users[scaler] if getattr(user, "grad_scaler", None) is scaler]
    _users[scaler] = WeakSet(using)
    found = [user for user in using if all(user is not one for one in stepping)]
    if not found:
        return None
    return UsageError(
        f"the grad scaler is shared with another {type(found[0]).__name__}, and each of its steps would update the "
        "scale that the other's loss was scaled by; step them as one with ChainedOptimizer([...]), or give each a "
        "scaler of its own (or delete the optimizer that you no longer use)"
    )


def require_values(device: torch.device) -> None:
    """Raise UsageError for an optimizer that was built on parameters of the meta device: it has nothing to train."""
    if device.type == "meta":
        raise UsageError(
            "the optimizer was built while its parameters were on the meta device, and so are its main params and "
            "state; call module.to_empty(device=...), load or initialise the weights, then build the optimizer"
        )


class JoinGuard:
    """Looks whether the DistributedDataParallels around some parameters are inside of ``join()``.

    A rank that has run out of batches answers there for DistributedDataParallel, but not for a step: the message of
    the others' decision would meet one of ``join()``, and gloo ends the process for that. Which modules there are is
    found out at the first step, in tens of milliseconds; each step then reads a flag.
    """

    def __init__(self) -> None:
        self._around: list[ref[DistributedDataParallel]] | None = None

    def check(self, params: Iterable[Tensor]) -> None:
        """Raise UsageError inside of ``join()``, unless that ends the loops of all ranks with the shortest."""
        if self._around is None:
            ours = {id(param) for param in params}
            self._around = [
                ref(one)
                for one in objects_of(DistributedDataParallel)
                if any(id(param) in ours for param in one.parameters())
            ]
        for wrapper in self._around:
            config = getattr(wrapper(), "_join_config", None)  # torch keeps it after the block
            if config is not None and config.enable and not config.throw_on_early_termination:
                raise UsageError(
                    "step() inside of DistributedDataParallel.join(): a rank that has run out of batches takes no part "
                    "in the decision that all ranks share. Give each rank as many batches (DistributedSampler does, "
                    "beside a DataLoader with drop_last=True), or pass join(throw_on_early_termination=True), which "
                    "raises a RuntimeError on every rank once the first has no more: catch it around the block"
                )


def was_skipped(agreed: Statistics) -> bool:
    """Return whether gradients overflowed."""
    return not agreed[Statistic.SUM_SQUARES] <= LARGEST_SUM_SQUARES or agreed[Statistic.NON_FINITE] > 0


def has_only_zeros(agreed: Statistics) -> bool:
    """Return whether no rank had a gradient other than zeros."""
    return agreed[Statistic.SUM_SQUARES] == 0 and agreed[Statistic.NON_FINITE] == 0


def have_replicas_parted(agreed: Statistics) -> bool:
    """Return whether, in a step without overflow, ranks that should hold the same gradient do not."""
    if was_skipped(agreed):
        return False
    return abs(agreed[Statistic.CONTRAST]) > REPLICA_TOLERANCE * agreed[Statistic.SUM_SQUARES]


def differing_replicas(every: Iterable[Mapping[ReplicaSet, float]]) -> dict[str, list[str]]:
    """Return, by what ranks are called, the names of parameters whose gradients differ between them.

    ``every``: of each rank, the sums of squares of its gradients.
    """
    first: dict[ReplicaSet, float] = {}
    differing: dict[str, dict[str, None]] = {}
    for theirs in every:
        for key, squares in theirs.items():
            expected = first.setdefault(key, squares)
            if abs(squares - expected) > REPLICA_TOLERANCE * max(squares, expected):
                kind, _, name = key
                differing.setdefault(kind, {})[name] = None
    return {kind: list(names) for kind, names in differing.items()}


def parted_replicas(differing: Mapping[str, Collection[str]]) -> UsageError:
    """Return the error for gradients that differ between ranks which should hold the same.

    ``differing``: what :func:`differing_replicas` has found, if anything.
    """
    tensor = differing.get("tensor-parallel")
    if tensor and not differing.get("data-parallel"):
        return UsageError(
            f"tensor-parallel ranks that hold the same parameters have different gradients, of {listed(tensor)}. Under "
            "sequence parallelism, all-reduce the gradients of such parameters over the tensor-parallel group before "
            "the step. Where each rank holds a part of the parameter, set its attribute tensor_model_parallel = True; "
            "where tensor-parallel ranks hold whole experts of their own, pass "
            "ParallelGroups(expert_tensor_parallel=None)"
        )
    data = differing.get("data-parallel")
    return UsageError(
        "ranks that hold the same parameters have different gradients: nobody has reduced them"
        f"{f' (those of {listed(data)})' if data else ''}. Wrap the model in "
        "DistributedDataParallel or fully_shard, or build the optimizer with grad_sync=GradSync(...) or as a "
        "DistributedOptimizer; with no_sync(), let the last backward of a step sync; give GradSync.set_divisor() "
        "the same number on every rank. If ranks hold different parameters (stages of a pipeline, a model of each "
        "rank's own), say so with groups=ParallelGroups(...); if the gradients are to differ, pass "
        "replicas_may_differ=True"
    )


def unscaled_loss_error() -> UsageError:
    """Return the error for gradients of a loss that was not scaled."""
    return UsageError(
        "the loss was not scaled: neither scale_loss() nor get_loss_scale() was called since the last step; call "
        "optimizer.scale_loss(loss).backward(), or multiply the loss by optimizer.get_loss_scale(). If the gradients "
        "are scaled in another way, pass grads_are_scaled=True when you build the optimizer"
    )
