"""A bucket: flat memory with a view of it for every parameter inside, and the reduction of what lies there.

The memory holds main grads, or the model params that are gathered after a sharded update. Every bucket is its own
allocation, so that moving parameters into flat memory needs the memory of one more bucket, not of all.
"""

import zlib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megascale.grad_sync.layout import Bucket
from megascale.grad_sync.reduction import BucketReduction, Divisor
from megascale.parallel import GradGroup
from megascale.utils.host_memory import host_copies, storage_bytes
from megascale.utils.streams import WriteOrder

GATHER_BIT = 1 << 30
"""Set in the tags of the messages that gather a bucket's model params, not in those of its reduction."""


class FlatBucket:
    """The memory of one bucket, zero at first.

    Attributes:
        bucket: where each parameter lies.
        flat: shape [bucket.numel], padding included.
        views: by name, contiguous, in the parameter's shape.
        order: orders the streams that write the views; its parts are named as they are.
    """

    def __init__(self, bucket: Bucket, params: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.bucket = bucket
        self.flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
        self.order = WriteOrder(self.flat)
        self._host: Tensor | None = None
        self.views = {at.name: self.flat[at.start : at.stop].view(params[at.name].shape) for at in bucket.placements}

    def leave(self, *, pin: bool, keep: bool) -> None:
        """Free the memory; all views stay, without memory, until :meth:`come_back`.

        Args:
            pin: see :func:`megascale.utils.host_memory.host_copies`, whose errors it raises.
            keep: copy the values to host memory first. False: they are zeros after the return.
        """
        self.order.join()
        if keep:
            [self._host] = host_copies([storage_bytes(self.flat)], pin=pin)
        self.flat.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Allocate the memory again, for the same views, with the values that it had. Does nothing if it is there.

        Counts as a write to the views: who reads them on a stream of its own meanwhile reads them anew.
        """
        if self.flat.untyped_storage().nbytes() > 0 or self.flat.numel() == 0:
            return
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        if self._host is None:
            self.flat.zero_()
        else:
            self.flat.copy_(self._host.view(self.flat.dtype), non_blocking=self._host.is_pinned())
            self._host = None

    def parts(self, rank: int) -> dict[str, Tensor]:
        """Return the memory of what ``rank`` owns of each parameter, by name: 1-D, empty where it owns nothing.

        Where parameters have owners, those of ``rank`` are whole, in their shapes.
        """
        parts = {piece.name: self.flat[piece.start : piece.stop] for piece in self.bucket.pieces(rank)}
        return parts | {name: self.views[name] for name, _, _, owner in self.bucket.placements if owner == rank}


@dataclass(eq=False)
class SyncedBucket:
    """A bucket of main grads, from the first gradient of a step until its reduction has begun.

    Attributes:
        params: by name.
        tag: of its messages.
        side: the stream that carries out reductions on its device; None: the host does.
        waiting: names of parameters whose gradients are still to come.
        fresh: names of those that had none in this step: the first one overwrites the main grad.
    """

    memory: FlatBucket
    group: GradGroup
    params: dict[str, nn.Parameter]
    reduction: BucketReduction
    tag: int
    side: torch.Stream | None
    waiting: set[str] = field(init=False)
    fresh: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        self.waiting = set(self.params)
        self.fresh = set(self.params)

    def start(self, divisor: Divisor) -> None:
        """Start the reduction, after the work of all streams that wrote gradients.

        Parameters that had no gradient take part with zeros.
        """
        if self.side is not None:  # behind the step before, where no stream has written since
            self.side.wait_stream(torch.accelerator.current_stream(self.memory.flat.device))
        with self.side or nullcontext():
            self.memory.order.join()
            for name in self.fresh:
                self.memory.views[name].zero_()
            self.fresh = set()
            self.reduction.start(divisor)


def tag_of(names: Iterable[str]) -> int:
    """Return the tag of a bucket's messages: a checksum of its parameters' names, so that all ranks have the same.

    Buckets of several optimizers may be reduced over one group at once, started in another order on each rank.
    """
    return zlib.crc32("\n".join(names).encode()) % GATHER_BIT
