"""Which rank owns which whole parameter. All ranks choose alike, because only shapes count.

Optimizers that read whole parameters, such as Muon and Shampoo, are sharded by parameter: one rank, the owner, updates
it. Owners are chosen longest first (LPT scheduling, Graham 1969): the costliest parameter that is left goes to the rank
with the least to do. This is done bucket by bucket, beginning with those that have the costliest parameters; what ranks
have to do adds up over buckets.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from megascale.grad_sync.layout import DEFAULT_ALIGNMENT, Bucket, ParamSize, Placement
from megascale.utils.multiples import rounded_up

MOST_PADDED = 1.25
"""How much longer a bucket may become for equal shards: on each rank in main grads, and in weights.

Memory sets it: if grouped operations have two thirds of the speed (an estimate: NCCL was not run), equal shards are
faster up to 1.5. Of Qwen3-0.6B's matrices 1.25 makes all shards equal on 2, 4 and 8 ranks, for 2.4, 2.9 and
6.7 % more elements: 22 operations a step in place of 42, 88 and 176. 1.5 gains less for its bytes: of Llama-3.2-1B's on
2 ranks 46 operations in place of 58, for 19 % in place of 8.6. Larger matrices are few to a bucket: no limit below 2
makes shards of Llama-3-8B's equal. test_padding_of_public_models counts all of them.
"""


def update_cost(shape: Sequence[int]) -> int:
    """Return the cost of updating a parameter of ``shape``, in multiplications up to a constant factor.

    A matrix of m rows and n columns costs ``max(m, n) * min(m, n) ** 2``, like an iteration of Newton-Schulz (Muon) or
    the root of its smaller factor (Shampoo). With more than two dimensions it is a batch of matrices, made of the last
    two; with fewer it costs one per element.
    """
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape) * min(shape[-2:])


Load = tuple[int, int, int]
"""Cost and elements of what a rank owns, and the rank."""


def assign_owners(buckets: Sequence[Sequence[ParamSize]], loads: list[Load]) -> dict[str, int]:
    """Return the owner of each parameter, by name. Of ranks with equal costs, that with fewer elements is taken.

    ``loads``: of all ranks, the idlest first: a heap, which begins as ``[(0, 0, rank) for rank in range(num_ranks)]``.
    What is assigned is added, so that loads add up over calls.
    """
    owners: dict[str, int] = {}
    for bucket in sorted(buckets, key=lambda bucket: -max((size.cost for size in bucket), default=0)):
        for size in sorted(bucket, key=lambda size: (-size.cost, -size.numel)):
            cost, numel, rank = loads[0]
            heapq.heapreplace(loads, (cost + size.cost, numel + size.numel, rank))
            owners[size.name] = rank
    return owners


def grouped(buckets: Sequence[Bucket], sizes: Mapping[str, ParamSize], loads: list[Load]) -> list[Bucket]:
    """Return ``buckets`` by owner, who are assigned here: see :func:`group_by_owner`. ``sizes``: by name."""
    owners = assign_owners([[sizes[placement.name] for placement in bucket.placements] for bucket in buckets], loads)
    return [group_by_owner(bucket, owners, len(loads)) for bucket in buckets]


def group_by_owner(
    bucket: Bucket, owners: Mapping[str, int], num_shards: int, *, alignment: int = DEFAULT_ALIGNMENT
) -> Bucket:
    """Return a bucket with its parameters sorted by owner: a rank's shard is what it owns of the bucket.

    The only padding is that of parameters to ``alignment`` elements. A rank that owns nothing has an empty shard, and
    takes part in the bucket's messages all the same.
    """
    placements: list[Placement] = []
    ends, position = [0] * num_shards, 0
    for name, start, stop, _ in sorted(bucket.placements, key=lambda placement: owners[placement.name]):
        owner, end = owners[name], position + stop - start
        placements.append(Placement(name, position, end, owner))
        position = ends[owner] = rounded_up(end, alignment)
    return Bucket(tuple(placements), (0, *accumulate(ends, max)))


def evened(bucket: Bucket) -> Bucket:
    """Return a bucket of whole parameters with shards as long as its longest, where few elements are added; else as is.

    Equal shards are one reduce-scatter and one all-gather. For others NCCL makes a reduction to each rank and a
    broadcast from each: rings alone, at some half to two thirds of that speed.
    """
    longest = max(end - begin for begin, end in pairwise(bucket.borders))
    borders = tuple(rank * longest for rank in range(len(bucket.borders)))
    if not bucket.numel < borders[-1] <= MOST_PADDED * bucket.numel:
        return bucket
    shifts = [new - old for new, old in zip(borders, bucket.borders, strict=True)]
    placed = ((at, shifts[at.owner or 0]) for at in bucket.placements)
    return Bucket(tuple(at._replace(start=at.start + by, stop=at.stop + by) for at, by in placed), borders)
