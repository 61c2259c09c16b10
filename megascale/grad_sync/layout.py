"""The layout of parameters in flat buffers, and the part that each rank owns: only arithmetic on sizes.

**What a shard owns.** Parameters of one kind (same dtype, param group and gradient group) share a flat *buffer*. The
buffer is cut into *buckets* of whole parameters, in the order in which backward is expected to finish their gradients,
so that a bucket is reduced while backward goes on. Each bucket is padded and cut into ``num_shards`` equal *shards*,
one per rank, and a shard's borders ignore where parameters begin: one reduce-scatter per bucket gives every rank its
shard of the gradients, one all-gather returns the updated parameters, and neither needs a copy. The price is that a
rank owns *pieces*: the end of one parameter, some whole ones, the beginning of another. Main params, optimizer state
and statistics exist for those pieces only.

    buffer    |  layer.2.weight        |bias|  layer.1.weight      | ...      the last layer's gradients come first
    bucket 0  |  layer.2.weight        |bias|pad|
    shards    |    rank 0    |    rank 1    |    two equal halves: rank 1 owns the end of a weight, and a bias

**Whole matrices.** An optimizer that reads them (Muon, Shampoo) cannot work on pieces. For it
:mod:`megascale.grad_sync.owners` makes shards of whole parameters, which are not equal.

**What is saved.** What belongs to which rank depends on the number of ranks, and nothing that is saved may: otherwise a
checkpoint would load on as many ranks as have written it, and on no others. State dicts and checkpoints name a
parameter and a range of its own elements (:class:`Piece`), never a position in a buffer.

Positions are elements from the start of the buffer, a *range* is half-open: [start, stop).
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megascale.errors import ArgumentError
from megascale.utils import validate

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
        kind: parameters of equal kind share a buffer: (dtype, param group, gradient group).
        cost: of its update, see :func:`megascale.grad_sync.owners.update_cost`; 0 where nobody asks.
    """

    name: str
    numel: int
    kind: Hashable = None
    cost: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A parameter's range in its buffer. ``owner``: the rank that owns all of it; None: shards cut it."""

    name: str
    start: int
    stop: int
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter inside some range of its buffer.

    Attributes:
        name: the parameter.
        param_start, param_stop: range in the parameter's own elements, flattened.
        start: where the piece starts in the buffer.
    """

    name: str
    param_start: int
    param_stop: int
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.param_stop - self.param_start


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of a buffer that is reduced and gathered at once, and the placements in it, in the order of position.

    ``borders``: where shards begin and end, one number more than there are shards. Empty: the shards are equal.
    """

    index: int
    start: int
    stop: int
    placements: tuple[Placement, ...]
    borders: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.stop - self.start


class BufferLayout:
    """One flat buffer.

    Attributes:
        kind: the kind of all its parameters.
        num_shards: how many ranks share each bucket.
        buckets: in the order of position; the first is expected to be ready first.
        placements: each parameter's range, in the order of position.
    """

    def __init__(self, kind: Hashable, num_shards: int, buckets: Sequence[Bucket]) -> None:
        self.kind = kind
        self.num_shards = num_shards
        self.buckets = tuple(buckets)
        self.placements = tuple(placement for bucket in buckets for placement in bucket.placements)
        self._starts = [placement.start for placement in self.placements]

    @property
    def numel(self) -> int:
        """Number of elements in the buffer, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    def shard(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """Return the range of ``bucket`` that ``rank`` owns."""
        if not 0 <= rank < self.num_shards:
            raise ArgumentError(f"rank={rank} must be between 0 and {self.num_shards - 1}")
        if bucket.borders:
            return bucket.borders[rank], bucket.borders[rank + 1]
        numel = bucket.numel // self.num_shards
        return bucket.start + rank * numel, bucket.start + (rank + 1) * numel

    def cuts(self, bucket: Bucket) -> list[int]:
        """Return where the shards of ``bucket`` begin and end: ``num_shards + 1`` numbers, from its start."""
        return [0, *(self.shard(bucket, rank)[1] - bucket.start for rank in range(self.num_shards))]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of parameters inside a range, in order. Padding yields nothing."""
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self.placements) and self.placements[index].start < stop:
            placement = self.placements[index]
            first, last = max(start, placement.start), min(stop, placement.stop)
            if first < last:
                yield Piece(placement.name, first - placement.start, last - placement.start, first)
            index += 1


def build_layouts(
    params: Iterable[ParamSize],
    num_shards: int,
    *,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    alignment: int = DEFAULT_ALIGNMENT,
) -> list[BufferLayout]:
    """Return one layout for each kind, in the order in which kinds first occur.

    Args:
        params: in the order in which the forward pass uses them. Gradients are expected in the reverse order, so that
            the last parameter lies first.
        num_shards: ranks that share each bucket, 1 or more.
        bucket_numel: a bucket is closed when it reaches this number of elements, alignment included; a larger parameter
            has its own.
        alignment: elements; parameters start, and shards start and end, at multiples of it.

    Raises:
        ArgumentError: for a repeated name, a negative size, or an argument that is not a positive integer.
    """
    validate.integer("num_shards", num_shards, minimum=1)
    validate.integer("bucket_numel", bucket_numel, minimum=1)
    validate.integer("alignment", alignment, minimum=1)
    by_kind: dict[Hashable, list[ParamSize]] = {}
    seen: set[str] = set()
    for param in params:
        validate.integer(f"numel of {param.name!r}", param.numel, minimum=0)
        if param.name in seen:
            raise ArgumentError(f"two parameters are called {param.name!r}")
        seen.add(param.name)
        by_kind.setdefault(param.kind, []).append(param)
    return [_build(kind, sizes[::-1], num_shards, bucket_numel, alignment) for kind, sizes in by_kind.items()]


def _build(kind: Hashable, sizes: list[ParamSize], num_shards: int, bucket_numel: int, alignment: int) -> BufferLayout:
    inside: list[Placement] = []
    buckets: list[Bucket] = []
    position = bucket_start = 0

    def close() -> None:
        nonlocal position, bucket_start
        position = bucket_start + rounded_up(position - bucket_start, num_shards * alignment)
        buckets.append(Bucket(len(buckets), bucket_start, position, tuple(inside)))
        bucket_start = position
        inside.clear()

    for size in sizes:
        # A parameter larger than a bucket does not make its neighbours wait for it.
        if size.numel > bucket_numel and inside:
            close()
        position = rounded_up(position, alignment)
        inside.append(Placement(size.name, position, position + size.numel))
        position += size.numel
        if position - bucket_start >= bucket_numel:
            close()
    if inside:
        close()
    return BufferLayout(kind, num_shards, buckets)


def rounded_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
