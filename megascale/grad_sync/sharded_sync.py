"""GradSync that keeps this rank's shard of every bucket only."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from megascale.grad_sync.layout import Bucket, ParamSize, build_buckets
from megascale.grad_sync.owners import Load, grouped
from megascale.grad_sync.sync import GradSync
from megascale.parallel import GradGroup
from megascale.utils.collectives import group_size


class ShardedGradSync(GradSync):
    """A GradSync that reduces only each rank's own shard of every bucket, by reduce-scatter.

    It may start without parameters.

    Args:
        named_parameters, options: see :class:`GradSync`.
        by_parameter: a shard holds whole parameters, whose owners :mod:`megascale.grad_sync.owners` chooses. False:
            shards are equal, and cut parameters anywhere.
    """

    owner_kind = "DistributedOptimizer"
    is_sharded = True

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, by_parameter: bool = False, **options: Any
    ) -> None:
        self._by_parameter = by_parameter
        self._loads: dict[bool, list[Load]] = {}
        super().__init__(named_parameters, **options)

    @override
    def _message_arguments(self) -> dict[str, object]:
        arguments = super()._message_arguments()
        overlap = arguments.pop("overlap")
        shard = "parameters" if self._by_parameter else "elements"
        return {"shard": repr(shard), **arguments, "overlap_grad_reduce": overlap}

    @override
    def cut(self, sizes: Sequence[ParamSize], group: GradGroup, *, expert: bool) -> list[Bucket]:
        num_shards = group_size(group.shard)
        even = build_buckets(sizes, num_shards, bucket_numel=self._bucket_numel)
        if not self._by_parameter:
            return even
        loads = self._loads.setdefault(expert, [(0, 0, rank) for rank in range(num_shards)])
        return grouped(even, {size.name: size for size in sizes}, loads)
