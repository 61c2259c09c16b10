"""Detects misuse in a step's agreed statistics. Every rank has the same numbers, so that all raise alike."""

from collections.abc import Sequence

from megascale.errors import UsageError
from megascale.kernels import LARGEST_SUM_SQUARES, REPLICA_TOLERANCE, Statistic

Statistics = Sequence[float]
"""Agreed statistics as host numbers, by :class:`megascale.kernels.Statistic`."""


def was_skipped(agreed: Statistics) -> bool:
    """Return whether gradients overflowed."""
    return not agreed[Statistic.SUM_SQUARES] <= LARGEST_SUM_SQUARES or agreed[Statistic.NON_FINITE] > 0


def has_only_zeros(agreed: Statistics) -> bool:
    """Return whether no rank had a gradient other than zeros."""
    return agreed[Statistic.SUM_SQUARES] == 0 and agreed[Statistic.NON_FINITE] == 0


def check_usage(agreed: Statistics) -> None:
    """Raise UsageError for gradients that were not scaled, or (in a step without overflow) not reduced."""
    if agreed[Statistic.SCALED] <= 0:
        raise unscaled_loss()
    if was_skipped(agreed):
        return
    if abs(agreed[Statistic.CONTRAST]) > REPLICA_TOLERANCE * agreed[Statistic.SUM_SQUARES]:
        raise UsageError(
            "ranks that hold the same parameters have different gradients: nobody has reduced them. Wrap the model in "
            "DistributedDataParallel or fully_shard, or build the optimizer with grad_sync=GradSync(...) or as a "
            "DistributedOptimizer; with no_sync(), let the last backward of a step sync; give GradSync.set_divisor() "
            "the same number on every rank. If ranks hold different parameters (stages of a pipeline, a model of each "
            "rank's own), say so with groups=ParallelGroups(...); if the gradients are to differ, pass "
            "replicas_may_differ=True"
        )


def unscaled_loss() -> UsageError:
    """Return the error for gradients of a loss that was not scaled."""
    return UsageError(
        "nobody has asked for the loss scale since the last step, so that these gradients cannot be scaled by it: call "
        "optimizer.scale_loss(loss).backward(), or multiply the loss by optimizer.get_loss_scale(). If the gradients "
        "are scaled by it in another way, pass grads_are_scaled=True when you build the optimizer"
    )
