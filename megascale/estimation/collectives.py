"""Collectives of one step, and their bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megascale.estimation.partition import Partition
from megascale.grad_sync.reduction import MESSAGE
from megascale.kernels.decision import NUM_STATISTICS

STATISTIC_BYTES = 8
"""Statistics are fp64."""
DDP_FIRST_BUCKET_BYTES = 1 << 20
DDP_BUCKET_BYTES = 25 << 20
"""Defaults of DistributedDataParallel."""
REDUCE, AGREE, GATHER = "reduce gradients", "agree on the step", "gather parameters"


@dataclass(frozen=True)
class Collective:
    """All calls of one operation for one purpose that a rank makes in a step.

    Attributes:
        purpose: what they are for.
        operation: "all_reduce", "reduce_scatter", "all_gather", or "send" (with as many receives).
        count: how many calls.
        payload: bytes of the tensors that these calls are given, in all; of an all_gather, bytes of the gathered ones.
        sent: bytes that leave the rank, in all. An all-reduce, reduce-scatter or all-gather is taken to be a ring.
    """

    purpose: str
    operation: str
    count: int
    payload: int
    sent: int


def collectives(partition: Partition) -> list[Collective]:
    """Return what a rank sends in one step of one backward, in the order of the step."""
    setup = partition.setup
    if setup.ranks == 1:
        return []
    statistics = NUM_STATISTICS * STATISTIC_BYTES
    agree = _ring(AGREE, "all_reduce", [statistics], setup.ranks, passes=2)
    if not setup.has_main_grads:
        return [_ring(REDUCE, "all_reduce", list(_ddp_buckets(partition)), setup.ranks, passes=2), agree]
    buckets = partition.buckets()
    grads = [bucket.numel * setup.travel_dtype_of(dtype).itemsize for dtype, bucket in buckets]
    params = [bucket.numel * dtype.itemsize for dtype, bucket in buckets]
    if not setup.is_sharded:
        return [_ring(REDUCE, "all_reduce", grads, setup.ranks, passes=2), agree]
    if not setup.sends_messages:
        return [
            _ring(REDUCE, "reduce_scatter", grads, setup.ranks, passes=1),
            agree,
            _ring(GATHER, "all_gather", params, setup.ranks, passes=1),
        ]
    reduced, gathered = _sent_grads(partition), _sent_params(partition)
    return [Collective(REDUCE, "send", *reduced), agree, Collective(GATHER, "send", *gathered)]


def _sent_grads(partition: Partition) -> tuple[int, int, int]:
    """Return count, payload and sent bytes of the messages that carry gradients to the other ranks' shards."""
    setup, count, nbytes = partition.setup, 0, 0
    for dtype, shards in partition.shards():
        others = [numel for rank, numel in enumerate(shards) if rank != setup.rank]
        count += sum(-(-numel // MESSAGE) for numel in others)
        nbytes += sum(others) * setup.travel_dtype_of(dtype).itemsize
    return count, nbytes, nbytes


def _sent_params(partition: Partition) -> tuple[int, int, int]:
    """Return count, payload and sent bytes of the messages that carry the rank's shards to the other ranks."""
    others = partition.setup.ranks - 1
    owned = [(dtype, shards[partition.setup.rank]) for dtype, shards in partition.shards()]
    nbytes = sum(numel * dtype.itemsize for dtype, numel in owned) * others
    return others * sum(numel > 0 for _, numel in owned), nbytes, nbytes


def _ring(purpose: str, operation: str, payloads: Sequence[int], ranks: int, *, passes: int) -> Collective:
    """Return collectives that go round a ring ``passes`` times: each time, ``(ranks - 1) / ranks`` of ``payloads``."""
    payload = sum(payloads)
    return Collective(purpose, operation, len(payloads), payload, passes * payload * (ranks - 1) // ranks)


def _ddp_buckets(partition: Partition) -> Iterable[int]:
    """Yield the bytes of DistributedDataParallel's buckets: each dtype's gradients in the order of backward."""
    for dtype in dict.fromkeys(param.dtype for param in partition.sizes.params):
        limit, held = DDP_FIRST_BUCKET_BYTES, 0
        for param in reversed(partition.sizes.params):
            if param.dtype != dtype:
                continue
            held += param.nbytes
            if held >= limit:
                yield held
                limit, held = DDP_BUCKET_BYTES, 0
        if held:
            yield held
