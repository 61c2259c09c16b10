"""Owners of whole parameters: properties for any sizes, and the balance for the shapes of public models."""

import math
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.errors import ArgumentError
from megascale.grad_sync.layout import ParamSize, build_layouts
from megascale.grad_sync.owners import OwnerLoads, group_by_owner, update_cost

Shape = tuple[int, ...]
SHAPES = st.lists(st.lists(st.integers(0, 12), min_size=0, max_size=3).map(tuple), max_size=20)


def _sizes(shapes: list[Shape], kind: object = None) -> list[ParamSize]:
    return [
        ParamSize(f"{kind}.{index}", math.prod(shape), kind, update_cost(shape)) for index, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    ("shape", "cost"),
    [((), 1), ((7,), 7), ((3, 5), 45), ((5, 3), 45), ((4, 3, 5), 180), ((2, 2, 5, 3), 180), ((0, 5), 0), ((2, 0), 0)],
)
def test_cost_is_a_function_of_the_shape(shape: Shape, cost: int) -> None:
    """A matrix costs max(m, n) * min(m, n)^2, a batch of them each, anything else its elements."""
    assert update_cost(shape) == cost


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, num_shards=st.integers(1, 7), bucket_numel=st.integers(1, 300), alignment=st.sampled_from([1, 8]))
def test_no_parameter_crosses_a_border(shapes: list[Shape], num_shards: int, bucket_numel: int, alignment: int) -> None:
    """Shards tile each bucket; each parameter lies whole in its owner's; a bucket keeps its parameters."""
    sizes = _sizes(shapes)
    for even in build_layouts(sizes, num_shards, bucket_numel=bucket_numel, alignment=alignment):
        inside = [b.placements for b in even.buckets]
        by_name = {size.name: size for size in sizes}
        owners = OwnerLoads(num_shards).assign([[by_name[p.name] for p in placements] for placements in inside])
        layout = group_by_owner(even, owners, alignment=alignment)
        assert [bucket.start for bucket in layout.buckets] == [0, *(bucket.stop for bucket in layout.buckets[:-1])]
        for bucket, before in zip(layout.buckets, inside, strict=True):
            own = bucket.placements
            assert {placement.name for placement in own} == {placement.name for placement in before}
            borders = [layout.shard(bucket, rank) for rank in range(num_shards)]
            assert [start for start, _ in borders] == [bucket.start, *(stop for _, stop in borders[:-1])]
            assert borders[-1][1] == bucket.stop
            assert layout.cuts(bucket) == [0, *(stop - bucket.start for _, stop in borders)]
            for placement in own:
                start, stop = borders[owners[placement.name]]
                assert start <= placement.start <= placement.stop <= stop
                assert placement.start % alignment == 0
                assert placement.stop - placement.start == by_name[placement.name].numel
            used = sum(placement.stop - placement.start for placement in own)
            assert bucket.numel - used <= len(own) * (alignment - 1)
        whole = {
            (rank, piece.name, piece.numel)
            for rank in range(num_shards)
            for bucket in layout.buckets
            for piece in layout.pieces(*layout.shard(bucket, rank))
        }
        assert whole == {(owners[size.name], size.name, size.numel) for size in sizes if size.numel}


@settings(max_examples=25, deadline=None)
@given(first=SHAPES, second=SHAPES, num_shards=st.integers(1, 5))
def test_load_is_carried_on(first: list[Shape], second: list[Shape], num_shards: int) -> None:
    """Loads are what owners own, over all calls; no rank is ahead of the idlest by more than one parameter."""
    loads = OwnerLoads(num_shards)
    owners: dict[str, int] = {}
    sizes = [*_sizes(first, "first"), *_sizes(second, "second")]
    for kind in ("first", "second"):
        owners |= loads.assign([[size for size in sizes if size.kind == kind]])
    assert loads.costs == [sum(s.cost for s in sizes if owners[s.name] == rank) for rank in range(num_shards)]
    assert loads.numels == [sum(s.numel for s in sizes if owners[s.name] == rank) for rank in range(num_shards)]
    assert max(loads.costs) - min(loads.costs) <= max((size.cost for size in sizes), default=0)


def test_parameters_without_a_cost_are_shared_out_by_their_elements() -> None:
    """A cost is 0 where nobody gives one."""
    loads = OwnerLoads(2)
    loads.assign([[ParamSize("a", 3), ParamSize("b", 2), ParamSize("c", 1)]])
    assert (loads.costs, loads.numels) == ([0, 0], [3, 3])


def test_wrong_owners_are_refused() -> None:
    """An owner that is missing, or is no rank, is named."""
    [layout] = build_layouts(_sizes([(3, 3)], "w"), 2)
    for owners in ({}, {"w.0": 2}, {"w.0": -1}):
        with pytest.raises(ArgumentError, match=r"owners\['w.0'\] is .*, must be a rank between 0 and 1"):
            group_by_owner(layout, owners)
    with pytest.raises(ArgumentError, match="num_shards must be 1 or more, got 0"):
        OwnerLoads(0)


def _llama_3_8b() -> list[Shape]:
    """Meta-Llama-3-8B's config.json: hidden 4096, 32 layers, 8 key-value heads of 128, MLP 14336, vocabulary 128256."""
    layer = [(4096,), (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (4096,)]
    layer += [(14336, 4096), (14336, 4096), (4096, 14336)]
    return [(128256, 4096), *layer * 32, (4096,), (128256, 4096)]


def _qwen3_235b_a22b() -> list[Shape]:
    """Qwen3-235B-A22B's config.json: hidden 4096, 94 layers, 64 and 4 heads of 128, 128 experts of 1536."""
    layer = [(4096,), (8192, 4096), (512, 4096), (512, 4096), (4096, 8192), (128,), (128,), (4096,), (128, 4096)]
    layer += [(1536, 4096), (1536, 4096), (4096, 1536)] * 128
    return [(151936, 4096), *layer * 94, (4096,), (151936, 4096)]


def _deepseek_v3() -> list[Shape]:
    """DeepSeek-V3's config.json, without multi-token prediction: hidden 7168, 61 layers, 256 experts of 2048 in 58."""
    attention = [(7168,), (1536, 7168), (1536,), (24576, 1536), (576, 7168), (512,), (32768, 512), (7168, 16384)]
    dense = [*attention, (7168,), (18432, 7168), (18432, 7168), (7168, 18432)]
    experts = [*attention, (7168,), (256, 7168), (256,), *[(2048, 7168), (2048, 7168), (7168, 2048)] * 257]
    return [(129280, 7168), *dense * 3, *experts * 58, (7168,), (129280, 7168)]


MODELS: dict[str, tuple[Callable[[], list[Shape]], float]] = {
    "Llama-3-8B": (_llama_3_8b, 8.03e9),
    "Qwen3-235B-A22B": (_qwen3_235b_a22b, 235.1e9),
    "DeepSeek-V3": (_deepseek_v3, 671.0e9),
}


@cache
def _model(name: str) -> tuple[list[ParamSize], list[list[ParamSize]]]:
    """Return a model's parameters, and its buckets, which are the same for any number of ranks."""
    sizes = _sizes(MODELS[name][0](), "fp16")
    by_name = {size.name: size for size in sizes}
    [layout] = build_layouts(sizes, 1)
    buckets = [bucket.placements for bucket in layout.buckets]
    return sizes, [[by_name[placement.name] for placement in bucket] for bucket in buckets]


@pytest.mark.default("Llama-3-8B-512", "Qwen3-235B-A22B-64", "DeepSeek-V3-8", "Llama-3-8B-64")
@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("name", MODELS)
def test_balance_of_public_models(name: str, ranks: int) -> None:
    """The costliest owner's work is near the best there is; memory and bytes are near those of equal shards.

    One parameter may be larger than that: Qwen3's embedding is 1.36 equal shards of 512.
    """
    sizes, buckets = _model(name)
    total = sum(size.numel for size in sizes)
    assert total == pytest.approx(MODELS[name][1], rel=1e-3)
    loads = OwnerLoads(ranks)
    loads.assign(buckets)
    assert max(loads.costs) <= 1.1 * max(sum(loads.costs) / ranks, max(size.cost for size in sizes))
    if len(sizes) >= 10 * ranks:
        # Of a bucket a rank sends what others own, and receives its own part from each other rank; so in the gather.
        even = 2 * (ranks - 1) * total / ranks
        assert max(loads.numels) <= max(1.2 * total / ranks, max(size.numel for size in sizes))
        assert max(total - numel + (ranks - 1) * numel for numel in loads.numels) <= 1.2 * even
