"""Which part of a model one rank keeps, from the layout of the buckets that training makes."""

from typing import cast

import torch

from megascale.estimation.setup import Setup
from megascale.estimation.sizes import ModelSizes
from megascale.grad_sync.layout import Bucket, BufferLayout, ParamSize, build_layouts
from megascale.utils.dtypes import HALF_DTYPES


class Partition:
    """A model's parameters, cut over ranks. All parameters are assumed to be in one param group.

    Attributes:
        sizes, setup: what it was made from.
        layouts: of the buckets; empty where there are none.
        kept: by parameter, elements whose main param and moments the rank keeps.
        num_pieces: by parameter, pieces over all ranks.
    """

    def __init__(self, sizes: ModelSizes, setup: Setup) -> None:
        self.sizes = sizes
        self.setup = setup
        self.layouts: list[BufferLayout] = []
        if setup.has_main_grads:
            params = [ParamSize(param.name, param.numel, param.dtype) for param in sizes.params]
            shards = setup.ranks if setup.is_sharded else 1
            self.layouts = build_layouts(params, shards, bucket_numel=setup.bucket_numel)
        self.kept = {param.name: param.numel for param in sizes.params}
        self.num_pieces = dict.fromkeys(self.kept, 1)
        if setup.is_sharded:
            self._cut()

    def buckets(self) -> list[tuple[torch.dtype, Bucket]]:
        """Return all buckets, with the dtype of their model params."""
        return [(dtype_of(layout), bucket) for layout in self.layouts for bucket in layout.buckets]

    def _cut(self) -> None:
        """Cut parameters as shards do. Costs time in proportion to parameters, not to ranks."""
        self.kept = dict.fromkeys(self.kept, 0)
        for layout in self.layouts:
            for _, piece in layout.shard_pieces(self.setup.rank):
                self.kept[piece.name] += piece.numel
            for bucket in layout.buckets:
                shard = max(bucket.numel // layout.num_shards, 1)
                for place in layout.placements[bucket.first_placement : bucket.last_placement]:
                    first, last = place.start - bucket.start, max(place.stop - 1, place.start) - bucket.start
                    self.num_pieces[place.name] = last // shard - first // shard + 1


def dtype_of(layout: BufferLayout) -> torch.dtype:
    """Return the dtype of a layout's model params, which is its kind."""
    return cast(torch.dtype, layout.kind)


def main_dtype_of(model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the main params of model params of ``model_dtype``."""
    return torch.float32 if model_dtype in HALF_DTYPES else model_dtype
