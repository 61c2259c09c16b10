"""SyncedBucket: a bucket of main grads from the first gradient of a step until its reduction has begun."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from megascale.grad_sync.bucket import FlatBucket
from megascale.grad_sync.reduction import BucketReduction, Divisor
from megascale.parallel import GradGroup
from megascale.utils.collectives import group_rank

GATHER_BIT = 1 << 30
"""Set in the tags of the messages that gather a bucket's model params, not in those of its reduction."""


@dataclass(eq=False)
class SyncedBucket:
    """One bucket: its parameters, its main grads, its reduction, and which gradients it still waits for."""

    index: int
    memory: FlatBucket
    group: GradGroup
    params: dict[str, nn.Parameter]
    reduction: BucketReduction
    tag: int
    waiting: set[str] = field(init=False)
    fresh: set[str] = field(init=False)
    started: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    @property
    def rank(self) -> int:
        """The index of this rank's shard."""
        return group_rank(self.group.shard)

    def reset(self) -> None:
        """Begin a new step: the first gradient of each parameter overwrites its main grad."""
        self.waiting = set(self.params)
        self.fresh = set(self.params)
        self.started = False

    def start(self, divisor: Divisor) -> None:
        """Start the reduction, after the work of all streams that wrote gradients.

        Parameters that had no gradient take part with zeros.
        """
        self.memory.order.join()
        for name in self.fresh:
            self.memory.views[name].zero_()
        self.fresh = set()
        self.started = True
        self.reduction.start(divisor)


def tag_of(names: Iterable[str]) -> int:
    """Return the tag of a bucket's messages: a checksum of its parameters' names, so that all ranks have the same.

    Buckets of several optimizers may be reduced over one group at once, started in another order on each rank.
    """
    return zlib.crc32("\n".join(names).encode()) % GATHER_BIT
