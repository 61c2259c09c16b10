"""Which part of a model one rank keeps, from the layout of the buckets that training makes."""

from itertools import pairwise
from typing import cast

import torch

from megascale.errors import ArgumentError
from megascale.estimation.setup import Setup
from megascale.estimation.sizes import ModelSizes
from megascale.grad_sync.layout import Bucket, BufferLayout, ParamSize, build_layouts
from megascale.grad_sync.owners import OwnerLoads, update_cost
from megascale.main_params.grad_memory import Layout, layout_of
from megascale.main_params.host_twin import goes
from megascale.main_params.update_unit import SLICE
from megascale.utils.dtypes import HALF_DTYPES


class Partition:
    """A model's parameters, cut over ranks. All parameters of one optimizer are taken to be in one param group.

    Attributes:
        sizes, setup: what it was made from.
        layouts: of the buckets; empty where there are none.
        kept: by parameter, how many elements of its main param and moments the rank keeps.
        there: by parameter, how many of these are in host memory.
        num_pieces: by parameter, into how many pieces all ranks together cut it.

    Raises ArgumentError for Muon without a hidden matrix.
    """

    def __init__(self, sizes: ModelSizes, setup: Setup) -> None:
        if setup.optimizer == "muon" and not any(param.is_hidden for param in sizes.params):
            raise ArgumentError(
                'optimizer="muon", but the model has no hidden matrix; give a module, or shapes of two dimensions'
            )
        self.sizes = sizes
        self.setup = setup
        self.layouts: list[BufferLayout] = []
        if setup.has_main_grads:
            for optimizer in dict.fromkeys(map(setup.optimizer_of, sizes.params)):
                self.layouts += self._layouts(optimizer)
        self.kept = {param.name: param.numel for param in sizes.params}
        self.num_pieces = dict.fromkeys(self.kept, 1)
        if setup.is_sharded:
            self._cut()
        self._dtypes = {param.name: param.dtype for param in sizes.params}
        self.there = dict.fromkeys(self.kept, 0)
        if setup.optimizer_cpu_offload:
            self._send_to_host()

    def slices(self) -> list[int]:
        """Return the elements of each slice of what lives in host memory, in the order of forward."""
        return [sum(self.there[name] for name in names) for names in self.units()]

    def units(self) -> list[list[str]]:
        """Return the names of the parameters of each slice: of shards those of a bucket, else of about 16M elements."""
        if self.setup.is_sharded:
            runs = [[name for name in names if self.there[name]] for names, _ in self._runs()]
            return [names for names in runs if names]
        made: list[list[str]] = []
        numel = 0
        for name, there in self.there.items():
            if not there:
                continue
            if made and numel + there <= SLICE:
                made[-1].append(name)
            else:
                made.append([name])
                numel = 0
            numel += there
        return made

    def grad_layout(self) -> Layout:
        """Return how copies of gradients lie in host memory, pinned: by slices.

        Raises UsageError, naming the bytes that would do, for too small a bound.
        """
        units = self.units()
        if self.setup.optimizer_offload_grad_bytes is None:
            return Layout(list(range(len(units))), [])
        sizes = [list(map(self.grad_bytes, names)) for names in units]
        return layout_of(sizes, self.setup.optimizer_offload_grad_bytes, pin=True)

    def grad_bytes(self, name: str) -> int:
        """Return the bytes of what of a parameter's gradient travels to host memory."""
        return self.there[name] * self.setup.grad_dtype_of(self._dtypes[name]).itemsize

    def _send_to_host(self) -> None:
        """Set ``there``. What forward needs first stays, whole parameters or whole buckets, as the fraction lets."""
        fraction, halves = self.setup.optimizer_offload_fraction, self._runs()
        for (names, _), is_gone in zip(halves, goes([numel for _, numel in halves], fraction), strict=True):
            if is_gone:
                self.there |= {name: self.kept[name] for name in names}

    def _runs(self) -> list[tuple[list[str], int]]:
        """Return names of 16-bit parameters that go to host memory together, with their elements, as forward reads."""
        if not self.setup.is_sharded:
            return [([param.name], param.numel) for param in self.sizes.params if param.dtype in HALF_DTYPES]
        return [
            ([place.name for place in bucket.placements], bucket.numel)
            for layout in reversed(self.layouts)
            for bucket in reversed(layout.buckets)
            if dtype_of(layout) in HALF_DTYPES
        ]

    def buckets(self) -> list[tuple[torch.dtype, Bucket]]:
        """Return all buckets, with the dtype of their model params."""
        return [(dtype_of(layout), bucket) for layout in self.layouts for bucket in layout.buckets]

    def _layouts(self, optimizer: str) -> list[BufferLayout]:
        """Return the layouts of all parameters that have this optimizer."""
        setup = self.setup
        params = {
            param.name: ParamSize(param.name, param.numel, param.dtype, cost=update_cost(param.shape))
            for param in self.sizes.params
            if setup.optimizer_of(param) == optimizer
        }
        shards = setup.ranks if setup.is_sharded else 1
        layouts = build_layouts(params.values(), shards, bucket_numel=setup.bucket_numel)
        if not setup.keeps_whole(optimizer):
            return layouts
        return OwnerLoads(shards).regrouped(layouts, params)

    def shards(self) -> list[tuple[torch.dtype, list[int]]]:
        """Return the elements of each rank's shard of each bucket, with the dtype of the bucket's model params."""
        found = []
        for layout in self.layouts:
            for bucket in layout.buckets:
                cuts = layout.cuts(bucket)
                found.append((dtype_of(layout), [stop - start for start, stop in pairwise(cuts)]))
        return found

    def _cut(self) -> None:
        """Set ``kept`` and ``num_pieces`` by what shards cut. Takes time for each parameter, not for each rank."""
        self.kept = dict.fromkeys(self.kept, 0)
        for layout in self.layouts:
            for _, piece in layout.shard_pieces(self.setup.rank):
                self.kept[piece.name] += piece.numel
            for bucket in layout.buckets:
                shard = max(bucket.numel // layout.num_shards, 1)
                for place in bucket.placements:
                    if bucket.borders:
                        continue
                    first, last = place.start - bucket.start, max(place.stop - 1, place.start) - bucket.start
                    self.num_pieces[place.name] = last // shard - first // shard + 1


def dtype_of(layout: BufferLayout) -> torch.dtype:
    """Return the dtype of a layout's model params, which is its kind."""
    return cast(torch.dtype, layout.kind)
