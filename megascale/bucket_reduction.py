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
    all_reduce_sum_start,
    exchange_shards_start,
    group_rank,
    group_size,
    reduce_scatter_sum_start,
    sums_own_shards,
)
from megascale.parallel import GradGroup


class BucketReduction(Protocol):
    """One bucket. Calls come in this order, once a step: start, settle, finish."""

    kept: Tensor
    """1-D: the part of the bucket that this rank keeps."""
    pre_divisor: int
    """``kept`` is the sum divided by it."""

    def start(self) -> None:
        """Begin, without waiting. The bucket is not written again until :meth:`finish`."""

    def settle(self) -> None:
        """Wait for what :meth:`start` began, and free its scratch."""

    def finish(self) -> None:
        """Wait until ``kept`` is reduced."""


def bucket_reduction(flat: Tensor, group: GradGroup, travel_dtype: torch.dtype, *, sharded: bool) -> BucketReduction:
    """Return the reduction of the bucket ``flat``."""
    if not sharded:
        return AllReduced(flat, group, travel_dtype)
    return ReduceScattered(flat, group, travel_dtype)


class _Reduction:
    """What both have: the payload, and division ahead of a 16-bit journey."""

    def __init__(self, flat: Tensor, group: GradGroup, travel_dtype: torch.dtype) -> None:
        self.flat = flat
        self.group = group
        self.travel_dtype = travel_dtype
        self.pre_divisor = group_size(group.holders) if travel_dtype.itemsize < 4 else 1
        self.payload: Tensor | None = None
        self.work: Work | None = None

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

    def start(self) -> None:
        """See :class:`BucketReduction`."""
        if group_size(self.group.holders) == 1:
            return
        self.payload = self.packed()
        self.work = all_reduce_sum_start(self.payload, self.group.holders)

    def settle(self) -> None:
        """See :class:`BucketReduction`."""
        if self.work is not None and self.payload is not None:
            self.work.wait()
            if self.payload is not self.flat:
                self.flat.copy_(self.payload)
        self.work = self.payload = None

    def finish(self) -> None:
        """See :class:`BucketReduction`."""
        self.settle()


class ReduceScattered(_Reduction):
    """Every rank keeps its shard. The rest of the bucket is undefined until the next step's gradients fill it."""

    def __init__(self, flat: Tensor, group: GradGroup, travel_dtype: torch.dtype) -> None:
        super().__init__(flat, group, travel_dtype)
        self.num_shards = group_size(group.shard)
        numel = flat.numel() // self.num_shards
        self.kept = flat[group_rank(group.shard) * numel :][:numel]
        self._exchange = sums_own_shards(group.shard)
        self._arrived: Tensor | None = None

    def start(self) -> None:
        """See :class:`BucketReduction`."""
        if group_size(self.group.holders) == 1:
            return
        payload = self.payload = self.packed()
        if self._exchange:
            self._arrived = torch.empty_like(payload)
            self.work = exchange_shards_start(self._arrived, payload, self.group.shard)
            return
        own = payload[group_rank(self.group.shard) * self.kept.numel() :][: self.kept.numel()]
        self._arrived = own
        self.work = reduce_scatter_sum_start(own, payload, self.group.shard)

    def settle(self) -> None:
        """See :class:`BucketReduction`."""
        arrived = self._arrived
        if arrived is None:
            return
        if self.work is not None:
            self.work.wait()
        if self._exchange:
            sum_in_order(arrived.view(self.num_shards, -1), self.kept)
        elif arrived.data_ptr() != self.kept.data_ptr():
            self.kept.copy_(arrived)
        self.payload = self._arrived = None
        self.work = all_reduce_sum_start(self.kept, self.group.replicate)

    def finish(self) -> None:
        """See :class:`BucketReduction`."""
        self.settle()
        if self.work is not None:
            self.work.wait()
            self.work = None


def sum_in_order(parts: Tensor, out: Tensor) -> None:
    """Write the sum of ``parts``, shape [ranks, numel], over the ranks into ``out``: in fp32 at least, rank 0 first."""
    if len(parts) == 2 and parts.dtype == out.dtype:
        # One addition rounds once, in any dtype.
        torch.add(parts[0], parts[1], out=out)
        return
    total = out if out.dtype.itemsize >= 4 else torch.empty_like(out, dtype=torch.float32)
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    if total is not out:
        out.copy_(total)
