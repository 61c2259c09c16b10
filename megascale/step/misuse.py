"""Detects misuse in a step's agreed statistics. Every rank has the same numbers, so that all raise alike."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from megascale.errors import UsageError, listed
from megascale.kernels import LARGEST_SUM_SQUARES, REPLICA_TOLERANCE, Statistic
from megascale.step.local_grads import ReplicaSet

BUILD_LAST = (
    "if it was built before fully_shard() or module.to_empty(), which replace parameters, or for another model, build "
    "it and its wrapper last, from the parameters of the model that is trained"
)
"""Why an optimizer has other parameters than the model, and the remedy."""

Statistics = Sequence[float]
"""Agreed statistics as host numbers, by :class:`megascale.kernels.Statistic`."""


def was_skipped(agreed: Statistics) -> bool:
    """Return whether gradients overflowed."""
    return not agreed[Statistic.SUM_SQUARES] <= LARGEST_SUM_SQUARES or agreed[Statistic.NON_FINITE] > 0


def has_only_zeros(agreed: Statistics) -> bool:
    """Return whether no rank had a gradient other than zeros."""
    return agreed[Statistic.SUM_SQUARES] == 0 and agreed[Statistic.NON_FINITE] == 0


def has_no_gradient(agreed: Statistics) -> bool:
    """Return whether every gradient was None, on every rank. See :data:`megascale.kernels.WITH_GRADS`."""
    return float(agreed[Statistic.SCALED]).is_integer()


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


def untrained_error() -> UsageError:
    """Return the error for an optimizer that has seen no gradient yet, in its first step."""
    return UsageError(
        "no parameter of the optimizer has a gradient, on any rank, in its first step, which would train nothing: "
        f"{BUILD_LAST}. Else backward() was not called, the loss does not depend on the parameters, or all are frozen"
    )


def unscaled_loss_error() -> UsageError:
    """Return the error for gradients of a loss that was not scaled."""
    return UsageError(
        "the loss was not scaled: neither scale_loss() nor get_loss_scale() was called since the last step; call "
        "optimizer.scale_loss(loss).backward(), or multiply the loss by optimizer.get_loss_scale(). If the gradients "
        "are scaled in another way, pass grads_are_scaled=True when you build the optimizer"
    )
