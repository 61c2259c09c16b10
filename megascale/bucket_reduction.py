"""The reduction of one bucket over the ranks that hold its parameters: what travels, and what this rank keeps of it.

Replicated main params keep the whole bucket; sharded ones keep this rank's shard, summed over the other copies of that
shard too where there are any. A 16-bit type that travels is divided by the number of ranks first, because 16-bit sums
overflow.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from megascale.collectives import (
    Pending,
    all_reduce_sum_start,
    exchange_shards_start,
    group_rank,
    group_size,
    is_message_passing,
    reduce_scatter_sum_start,
)
from megascale.parallel import GradGroup


class BucketReduction(Protocol):
    """One bucket. Calls come in this order, once a step: start, settle, finish."""

    kept: Tensor
    """1-D: the part of the bucket that this rank keeps."""
    pre_divisor: int
    """``kept`` is the sum divided by it."""
    has_scratch: bool
    """Whether memory of the bucket's size is held between :meth:`start` and :meth:`settle`."""

    def start(self) -> None:
        """Begin, without waiting. The bucket is not written again until :meth:`finish`."""

    def settle(self) -> None:
        """Wait for what :meth:`start` began, and free its scratch."""

    def finish(self) -> None:
        """Wait until ``kept`` is reduced."""


class ScratchPool:
    """Memory that reductions under way borrow, and give back for the next ones. Fresh pages cost more than the sum."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Return uninitialised memory of shape [numel], dtype and device of ``like``."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= numel and (buffer.dtype, buffer.device) == (like.dtype, like.device):
                return self._free.pop(index)[:numel]
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def give_back(self, buffer: Tensor) -> None:
        """Let others use what :meth:`take` returned."""
        whole = buffer if buffer._base is None else buffer._base
        self._free.append(whole)


def bucket_reduction(
    flat: Tensor, group: GradGroup, travel_dtype: torch.dtype, pool: ScratchPool, *, sharded: bool
) -> BucketReduction:
    """Return the reduction of the bucket ``flat``."""
    if not sharded:
        return AllReduced(flat, group, travel_dtype)
    if is_message_passing(group.shard):
        return Exchanged(flat, group, travel_dtype, pool)
    return ReduceScattered(flat, group, travel_dtype)


class _Reduction:
    """What all have: the payload, and division ahead of a 16-bit journey."""

    def __init__(self, flat: Tensor, group: GradGroup, travel_dtype: torch.dtype) -> None:
        self.flat = flat
        self.group = group
        self.travel_dtype = travel_dtype
        self.pre_divisor = group_size(group.holders) if travel_dtype.itemsize < 4 else 1
        self.has_scratch = travel_dtype != flat.dtype
        self.payload: Tensor | None = None

    def packed(self) -> Tensor:
        """Return the bucket as it travels: itself, or a copy in another dtype."""
        if self.pre_divisor != 1:
            self.flat.div_(self.pre_divisor)
        return self.flat.to(self.travel_dtype)


class AllReduced(_Reduction):
    """Every rank keeps the whole bucket."""

    def __init__(self, flat: Tensor, group: GradGroup, travel_dtype: torch.dtype) -> None:
        super().__init__(flat, group, travel_dtype)
        self.kept = flat
        self._work: Work | None = None

    def start(self) -> None:
        """See :class:`BucketReduction`."""
        if group_size(self.group.holders) == 1:
            return
        self.payload = self.packed()
        self._work = all_reduce_sum_start(self.payload, self.group.holders)

    def settle(self) -> None:
        """See :class:`BucketReduction`."""
        if self._work is not None and self.payload is not None:
            self._work.wait()
            if self.payload is not self.flat:
                self.flat.copy_(self.payload)
        self._work = self.payload = None

    def finish(self) -> None:
        """See :class:`BucketReduction`."""
        self.settle()


class _Sharded(_Reduction):
    """Every rank keeps its shard. The rest of the bucket is undefined until the next step's gradients fill it."""

    def __init__(self, flat: Tensor, group: GradGroup, travel_dtype: torch.dtype) -> None:
        super().__init__(flat, group, travel_dtype)
        self.rank = group_rank(group.shard)
        self.num_shards = group_size(group.shard)
        self.kept = flat.view(self.num_shards, -1)[self.rank]
        self._over_replicas: Work | None = None

    def own_part(self, payload: Tensor) -> Tensor:
        """Return this rank's shard of a payload."""
        return payload.view(self.num_shards, -1)[self.rank]

    def sum_over_replicas(self) -> None:
        """Begin to add the other copies of this shard."""
        self.payload = None
        self._over_replicas = all_reduce_sum_start(self.kept, self.group.replicate)

    def settle(self) -> None:
        """See :class:`BucketReduction`."""
        raise NotImplementedError

    def finish(self) -> None:
        """See :class:`BucketReduction`."""
        self.settle()
        if self._over_replicas is not None:
            self._over_replicas.wait()
            self._over_replicas = None


class ReduceScattered(_Sharded):
    """By the backend's own reduce-scatter, in place where the dtype is the same."""

    _work: Work | None = None

    def start(self) -> None:
        """See :class:`BucketReduction`."""
        if group_size(self.group.holders) == 1:
            return
        self.payload = self.packed()
        self._work = reduce_scatter_sum_start(self.own_part(self.payload), self.payload, self.group.shard)

    def settle(self) -> None:
        """See :class:`BucketReduction`."""
        if self.payload is None:
            return
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.payload is not self.flat:
            self.kept.copy_(self.own_part(self.payload))
        self.sum_over_replicas()


class Exchanged(_Sharded):
    """By messages from rank to rank, summed on arrival: in fp32 at least, in the order of ranks."""

    def __init__(self, flat: Tensor, group: GradGroup, travel_dtype: torch.dtype, pool: ScratchPool) -> None:
        super().__init__(flat, group, travel_dtype)
        self.has_scratch = True
        self._pool = pool
        self._arrived: Tensor | None = None
        self._pending: Pending | None = None

    def start(self) -> None:
        """See :class:`BucketReduction`."""
        self.payload = self.packed()
        self._arrived = self._pool.take((self.num_shards - 1) * self.kept.numel(), self.payload)
        self._pending = exchange_shards_start(
            self._arrived.view(self.num_shards - 1, -1), self.payload, self.group.shard
        )

    def settle(self) -> None:
        """See :class:`BucketReduction`."""
        if self._pending is None or self._arrived is None or self.payload is None:
            return
        self._pending.wait()
        others = list(self._arrived.view(self.num_shards - 1, -1).unbind())
        sum_in_order([*others[: self.rank], self.own_part(self.payload), *others[self.rank :]], self.kept, self.rank)
        self._pool.give_back(self._arrived)
        self._arrived = self._pending = None
        self.sum_over_replicas()


def sum_in_order(parts: list[Tensor], out: Tensor, own: int) -> None:
    """Write the sum of ``parts`` into ``out``: rank 0 first, in fp32 at least. ``parts[own]`` may be ``out`` itself.

    The other parts are scratch.
    """
    narrow = out.dtype.itemsize < 4 and len(parts) > 2
    if narrow or parts[own].data_ptr() != out.data_ptr():
        total = torch.empty_like(out, dtype=torch.float32) if out.dtype.itemsize < 4 else out
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        if total is not out:
            out.copy_(total)
        return
    # What comes before the own part is added up first; the sum of two is the same either way round.
    before, after = parts[:own], parts[own + 1 :]
    if before:
        for part in before[1:]:
            before[0].add_(part)
        out.add_(before[0])
    for part in after:
        out.add_(part)
