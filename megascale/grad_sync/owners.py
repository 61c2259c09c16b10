"""Which rank owns which whole parameter: only arithmetic on shapes, so that all ranks choose alike.

An optimizer that reads whole parameters, as Muon and Shampoo do, is sharded by parameter: one rank updates it. Inside a
bucket owners are chosen longest first (LPT scheduling, Graham 1969): the costliest parameter goes to the rank that has
the least to do. The load is carried from bucket to bucket, and the buckets with the costliest parameters come first.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

from megascale.errors import ArgumentError
from megascale.grad_sync.layout import DEFAULT_ALIGNMENT, Bucket, BufferLayout, ParamSize, Placement, rounded_up
from megascale.utils import validate


def update_cost(shape: Sequence[int]) -> int:
    """Return the cost of updating a parameter of ``shape``, in multiplications up to a constant factor.

    A matrix of m rows and n columns costs ``max(m, n) * min(m, n) ** 2``, as one iteration of Newton-Schulz (Muon) or a
    root of its smaller factor (Shampoo) does. More dimensions are a batch of matrices, the last two. Fewer cost one per
    element.
    """
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape) * min(shape[-2:])


class OwnerLoads:
    """What each rank has to update, from its first bucket to its last.

    Args:
        num_shards: ranks that share each bucket, 1 or more.

    Attributes:
        costs: of what each rank owns, see :func:`update_cost`.
        numels: elements that each rank owns.
    """

    def __init__(self, num_shards: int) -> None:
        validate.integer("num_shards", num_shards, minimum=1)
        self.costs = [0] * num_shards
        self.numels = [0] * num_shards

    def assign(self, buckets: Sequence[Sequence[ParamSize]]) -> dict[str, int]:
        """Return the owner of each parameter, by name. Of ranks with equal costs that with fewer elements is taken."""
        idlest = [(cost, numel, rank) for rank, (cost, numel) in enumerate(zip(self.costs, self.numels, strict=True))]
        heapq.heapify(idlest)
        owners: dict[str, int] = {}
        for bucket in sorted(buckets, key=lambda bucket: -max((size.cost for size in bucket), default=0)):
            for size in sorted(bucket, key=lambda size: (-size.cost, -size.numel)):
                cost, numel, rank = idlest[0]
                heapq.heapreplace(idlest, (cost + size.cost, numel + size.numel, rank))
                owners[size.name] = rank
        for cost, numel, rank in idlest:
            self.costs[rank], self.numels[rank] = cost, numel
        return owners


def group_by_owner(
    layout: BufferLayout, owners: Mapping[str, int], *, alignment: int = DEFAULT_ALIGNMENT
) -> BufferLayout:
    """Return ``layout`` with each bucket's parameters sorted by owner, and shards that end where an owner's do.

    Buckets hold the same parameters as before. There is no padding but that of parameters to ``alignment`` elements; a
    rank that owns nothing of a bucket has an empty shard.

    Raises ArgumentError, naming it, for a parameter whose owner is missing or no rank of the layout.
    """
    placements: list[Placement] = []
    buckets: list[Bucket] = []
    position = 0
    for bucket in layout.buckets:
        inside = layout.placements[bucket.first_placement : bucket.last_placement]
        by_owner: list[list[Placement]] = [[] for _ in range(layout.num_shards)]
        for placement in inside:
            by_owner[_checked(owners.get(placement.name), placement.name, layout.num_shards)].append(placement)
        borders = [position]
        for owner, owned in enumerate(by_owner):
            for placement in owned:
                stop = position + placement.stop - placement.start
                placements.append(Placement(placement.name, position, stop, owner))
                position = rounded_up(stop, alignment)
            borders.append(position)
        first, last = bucket.first_placement, bucket.last_placement
        buckets.append(Bucket(bucket.index, borders[0], position, first, last, tuple(borders)))
    return BufferLayout(layout.kind, layout.num_shards, placements, buckets)


def _checked(owner: int | None, name: str, num_shards: int) -> int:
    if owner is None or not 0 <= owner < num_shards:
        raise ArgumentError(
            f"owners[{name!r}] is {owner}, must be a rank between 0 and {num_shards - 1}; take them from "
            "OwnerLoads.assign()"
        )
    return owner
