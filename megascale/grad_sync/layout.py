"""The layout of parameters in buckets, and the part that each rank owns: only arithmetic on sizes.

**What a shard owns.** Parameters of one kind (same dtype, param group and gradient group) are cut into *buckets* of
whole parameters, in the order in which backward is expected to finish their gradients, so that a bucket is reduced
while backward goes on. Each bucket is padded and cut into ``num_shards`` equal *shards*, one per rank, and a shard's
borders ignore where parameters begin: one reduce-scatter per bucket gives every rank its shard of the gradients, one
all-gather returns the updated parameters, and neither needs a copy. The price is that a rank owns *pieces*: the end of
one parameter, some whole ones, the beginning of another. Main params, optimizer state and statistics exist for those
pieces only.

    bucket 0  |  layer.2.weight        |bias|pad|    the last layer's gradients come first
    shards    |    rank 0    |    rank 1    |        two equal halves: rank 1 owns the end of a weight, and a bias
    bucket 1  |  layer.1.weight      | ...

**Whole matrices.** An optimizer that reads them (Muon, Shampoo) cannot work on pieces. For it
:mod:`megascale.grad_sync.owners` makes shards of whole parameters, which are not equal.

**What is saved.** What belongs to which rank depends on the number of ranks, and nothing that is saved may: otherwise a
checkpoint would load on as many ranks as have written it, and on no others. State dicts and checkpoints name a
parameter and a range of its own elements (:class:`Piece`), never a position in a bucket.

Positions are elements from the start of the bucket, a *range* is half-open: [start, stop).
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megascale.utils.multiples import rounded_up

DEFAULT_ALIGNMENT = 64
"""Elements: 128 bytes of a 16-bit type, 256 of fp32. Parameters and shards start at multiples of it."""
DEFAULT_BUCKET_NUMEL = 40_000_000
"""Elements: Megatron-Core's default bucket."""


@dataclass(frozen=True, slots=True)
class ParamSize:
    """A parameter, as far as the layout needs it.

    Attributes:
        name: unique.
        numel: elements, 0 or more.
        kind: parameters of equal kind share buckets: (dtype, param group, gradient group).
        cost: of its update, see :func:`megascale.grad_sync.owners.update_cost`; 0 where nobody asks.
    """

    name: str
    numel: int
    kind: Hashable = None
    cost: int = 0


class Placement(NamedTuple):
    """A parameter's range in its bucket. ``owner``: the rank that owns all of it; None: shards cut it."""

    name: str
    start: int
    stop: int
    owner: int | None = None


class Piece(NamedTuple):
    """What one rank owns of a parameter.

    Attributes:
        name: the parameter.
        param_start: where the piece begins in the parameter's own elements, flattened; 0 of an empty one.
        start, stop: its range in the bucket.
        is_owned: False where another rank owns the parameter whole.
    """

    name: str
    param_start: int
    start: int
    stop: int
    is_owned: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are reduced and gathered at once.

    Attributes:
        placements: where they lie, in the order of position.
        borders: where shards begin and end: one number more than there are shards.
    """

    placements: tuple[Placement, ...]
    borders: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.borders[-1]

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield what ``rank`` owns of each parameter: one piece, as shards are contiguous, or an empty one."""
        begin, end = self.borders[rank : rank + 2]
        for name, start, stop, owner in self.placements:
            first, last = max(begin, start), min(end, stop)
            if first >= last:
                first = last = start
            yield Piece(name, first - start, first, last, owner in (None, rank))


def build_buckets(
    params: Iterable[ParamSize],
    num_shards: int,
    *,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    alignment: int = DEFAULT_ALIGNMENT,
) -> list[Bucket]:
    """Return the buckets of each kind, in the order in which kinds first occur.

    Args:
        params: in the order in which the forward pass uses them. Gradients are expected in the reverse order, so that
            the last parameter lies first.
        num_shards: ranks that share each bucket, 1 or more.
        bucket_numel: a bucket is closed when it reaches this number of elements, alignment included; a larger parameter
            has its own.
        alignment: elements; parameters start, and shards start and end, at multiples of it.
    """
    by_kind: dict[Hashable, list[ParamSize]] = {}
    for param in params:
        by_kind.setdefault(param.kind, []).append(param)
    buckets: list[Bucket] = []
    for sizes in by_kind.values():
        listed: list[list[Placement]] = []
        for size in reversed(sizes):
            # A parameter larger than a bucket does not make its neighbours wait for it.
            if not listed or listed[-1][-1].stop >= bucket_numel or size.numel > bucket_numel:
                listed.append([])
            start = rounded_up(listed[-1][-1].stop, alignment) if listed[-1] else 0
            listed[-1].append(Placement(size.name, start, start + size.numel))
        for placements in listed:
            numel = rounded_up(placements[-1].stop, num_shards * alignment) // num_shards
            buckets.append(Bucket(tuple(placements), tuple(rank * numel for rank in range(num_shards + 1))))
    return buckets
