"""Parameters that ranks must treat alike: what a rank leaves out of a step, and what is new in it.

A step may leave out a parameter that was frozen since, or has no gradient. So may a sharded optimizer one that is no
longer in a param group.

All ranks may leave out a parameter, but not one alone: it would stay as it is there, while others update theirs. So
each rank adds numbers to its count of errors that cancel where all ranks leave out the same. So it does for parameters
that are new, where GradSync reduces their gradients: their first values must be the same.
"""

import functools
import random
import zlib
from collections.abc import Collection, Mapping

from torch import nn

from megascale.errors import ArgumentError, UsageError, listed
from megascale.main_params.replica_check import digests
from megascale.parallel import ParallelGroups
from megascale.utils.collectives import group_rank, group_size

LARGEST = 1023
"""Of a factor. Sums of their products are exact in the statistics dtype."""


@functools.cache
def cancelling(num_ranks: int) -> tuple[int, ...]:
    """Return one integer for each of ``num_ranks``: they add up to 0, those of fewer ranks do not, as far as possible.

    They are drawn at random with a fixed seed.
    """
    generator = random.Random(0)
    drawn = [generator.randint(1, LARGEST) for _ in range(num_ranks - 1)]
    return (*drawn, -sum(drawn))


def absence(params: Mapping[str, nn.Parameter], groups: ParallelGroups) -> int:
    """Return this rank's number for the parameters that it leaves out: 0 for none. Ranks' numbers are added up."""
    total = 0
    for name, param in params.items():
        holders = groups.of_param(param).holders
        factor = zlib.crc32(name.encode()) % LARGEST + 1
        total += factor * cancelling(group_size(holders))[group_rank(holders)]
    return total


def novelty(params: Mapping[str, nn.Parameter], groups: ParallelGroups) -> int:
    """Return this rank's number for parameters that are new in this step: ranks' numbers add up to 0 if these hold the
    same values, but for one in a thousand cases. Reads the parameters, and waits for their device.
    """
    total = 0
    for name, digest in digests(params).items():
        holders = groups.of_param(params[name]).holders
        factor = zlib.crc32(repr((name, digest)).encode()) % LARGEST + 1
        total += factor * cancelling(group_size(holders))[group_rank(holders)]
    return total


def novelty_error(params: Collection[str]) -> ArgumentError | None:
    """Return the error of a rank whose new parameters are not those of others; None where it has none."""
    if not params:
        return None
    return ArgumentError(
        f"parameters that are new in this step differ between data-parallel ranks: among {listed(params)}; unfreeze "
        "the same ones with the same values on every rank, before GradSync.add(), or pass replicas_may_differ=True"
    )


def absence_error(params: Collection[str]) -> UsageError | None:
    """Return the error of a rank that leaves out parameters, where others do not; None where it leaves out none."""
    if not params:
        return None
    return UsageError(
        f"parameter {listed(params)} takes no part in the step on this rank, frozen, without a gradient or in no "
        "param group, but other ranks update it: freeze it, or take it out, on every rank alike"
    )
