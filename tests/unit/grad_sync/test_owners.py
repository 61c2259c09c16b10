"""Owners of whole parameters: properties for any sizes, and the balance for the shapes of public models."""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.grad_sync import owners as owners_module
from megascale.grad_sync.layout import ParamSize, Piece, build_buckets
from megascale.grad_sync.owners import MOST_PADDED, Load, assign_owners, evened, group_by_owner, grouped, update_cost

Shape = tuple[int, ...]
SHAPES = st.lists(st.lists(st.integers(0, 12), min_size=0, max_size=3).map(tuple), max_size=20)


def _no_loads(num_ranks: int) -> list[Load]:
    return [(0, 0, rank) for rank in range(num_ranks)]


def _costs_and_numels(loads: list[Load]) -> tuple[list[int], list[int]]:
    """Return the cost, and the elements, of what each rank owns."""
    by_rank = sorted(loads, key=lambda load: load[2])
    return [cost for cost, _, _ in by_rank], [numel for _, numel, _ in by_rank]


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


def _sized(piece: Piece) -> tuple[str, int, int]:
    return piece.name, piece.param_start, piece.stop - piece.start


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, num_shards=st.integers(1, 7), bucket_numel=st.integers(1, 300), alignment=st.sampled_from([1, 8]))
def test_no_parameter_crosses_a_border(shapes: list[Shape], num_shards: int, bucket_numel: int, alignment: int) -> None:
    """Shards tile each bucket; each parameter lies whole in its owner's; a bucket keeps its parameters.

    Where shards become equal by little padding, the owners have the same pieces.
    """
    sizes = _sizes(shapes)
    by_name = {size.name: size for size in sizes}
    loads = _no_loads(num_shards)
    whole = set()
    for even in build_buckets(sizes, num_shards, bucket_numel=bucket_numel, alignment=alignment):
        owners = assign_owners([[by_name[placement.name] for placement in even.placements]], loads)
        bucket = group_by_owner(even, owners, num_shards, alignment=alignment)
        padded, longest = evened(bucket), max(end - begin for begin, end in pairwise(bucket.borders))
        assert padded.numel == (
            longest * num_shards if longest * num_shards <= MOST_PADDED * bucket.numel else bucket.numel
        )
        for rank in range(num_shards):
            assert [_sized(piece) for piece in padded.pieces(rank)] == [_sized(piece) for piece in bucket.pieces(rank)]
        assert {placement.name for placement in bucket.placements} == {placement.name for placement in even.placements}
        borders = list(pairwise(bucket.borders))
        assert (len(borders), bucket.borders[0]) == (num_shards, 0)
        assert all(begin <= end for begin, end in borders)
        for placement in bucket.placements:
            begin, end = borders[owners[placement.name]]
            assert begin <= placement.start <= placement.stop <= end
            assert placement.start % alignment == 0
            assert placement.stop - placement.start == by_name[placement.name].numel
        used = sum(placement.stop - placement.start for placement in bucket.placements)
        assert bucket.numel - used <= len(bucket.placements) * (alignment - 1)
        for rank in range(num_shards):
            pieces = list(bucket.pieces(rank))
            assert all(piece.is_owned == (owners[piece.name] == rank) for piece in pieces)
            whole |= {(piece.name, piece.stop - piece.start) for piece in pieces if piece.start < piece.stop}
    assert whole == {(size.name, size.numel) for size in sizes if size.numel}


@settings(max_examples=25, deadline=None)
@given(first=SHAPES, second=SHAPES, num_shards=st.integers(1, 5))
def test_load_is_carried_on(first: list[Shape], second: list[Shape], num_shards: int) -> None:
    """Loads are what owners own, over all calls; no rank is ahead of the idlest by more than one parameter."""
    loads = _no_loads(num_shards)
    owners: dict[str, int] = {}
    sizes = [*_sizes(first, "first"), *_sizes(second, "second")]
    for kind in ("first", "second"):
        owners |= assign_owners([[size for size in sizes if size.kind == kind]], loads)
    costs, numels = _costs_and_numels(loads)
    assert costs == [sum(s.cost for s in sizes if owners[s.name] == rank) for rank in range(num_shards)]
    assert numels == [sum(s.numel for s in sizes if owners[s.name] == rank) for rank in range(num_shards)]
    assert max(costs) - min(costs) <= max((size.cost for size in sizes), default=0)


def test_parameters_without_a_cost_are_shared_out_by_their_elements() -> None:
    """A cost is 0 where nobody gives one."""
    loads = _no_loads(2)
    assign_owners([[ParamSize("a", 3), ParamSize("b", 2), ParamSize("c", 1)]], loads)
    assert _costs_and_numels(loads) == ([0, 0], [3, 3])


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
    buckets = [bucket.placements for bucket in build_buckets(sizes, 1)]
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
    loads = _no_loads(ranks)
    assign_owners(buckets, loads)
    costs, numels = _costs_and_numels(loads)
    assert max(costs) <= 1.1 * max(sum(costs) / ranks, max(size.cost for size in sizes))
    if len(sizes) >= 10 * ranks:
        # Of a bucket a rank sends what others own, and receives its own part from each other rank; so in the gather.
        even = 2 * (ranks - 1) * total / ranks
        assert max(numels) <= max(1.2 * total / ranks, max(size.numel for size in sizes))
        assert max(total - numel + (ranks - 1) * numel for numel in numels) <= 1.2 * even


MATRICES: dict[str, tuple[list[Shape], int]] = {
    "Qwen3-0.6B": ([(2048, 1024), *[(1024, 1024)] * 2, (1024, 2048), *[(3072, 1024)] * 2, (1024, 3072)], 28),
    "Llama-3.2-1B": ([(2048, 2048), *[(512, 2048)] * 2, (2048, 2048), *[(8192, 2048)] * 2, (2048, 8192)], 16),
    "Llama-3-8B": ([(4096, 4096), *[(1024, 4096)] * 2, (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)], 32),
}
"""The matrices of a layer, which Muon updates, and how many layers there are."""


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("Qwen3-0.6B", 2, [(42, 0), (22, 24), (22, 24), (22, 24), (22, 24)]),
        ("Qwen3-0.6B", 4, [(88, 0), (22, 29), (22, 29), (22, 29), (22, 29)]),
        ("Qwen3-0.6B", 8, [(176, 0), (50, 24), (22, 67), (22, 67), (22, 67)]),
        ("Llama-3.2-1B", 2, [(78, 0), (78, 0), (58, 86), (46, 190), (44, 200)]),
        ("Llama-3.2-1B", 4, [(176, 0), (176, 0), (176, 0), (140, 103), (50, 481)]),
        ("Llama-3-8B", 2, [(448, 0), (448, 0), (448, 0), (448, 0), (256, 808)]),
    ],
)
def test_padding_of_public_models(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, expected: list[tuple[int, int]]
) -> None:
    """What MOST_PADDED is chosen by: the operations that NCCL makes in a step, and the elements added, in per mille.

    Of equal shards a reduce-scatter and an all-gather, else a reduction to each rank and a broadcast from each. For
    limits of 1 (no padding), 1.1, 1.25, 1.5 and 2.
    """
    shapes, layers = MATRICES[name]
    sizes = _sizes(shapes * layers)
    buckets = grouped(build_buckets(sizes, ranks), {size.name: size for size in sizes}, _no_loads(ranks))
    numel, found = sum(size.numel for size in sizes), list[tuple[int, int]]()
    for limit in (1.0, 1.1, 1.25, 1.5, 2.0):
        monkeypatch.setattr(owners_module, "MOST_PADDED", limit)
        padded = [evened(bucket) for bucket in buckets]
        equal = sum(len({end - begin for begin, end in pairwise(bucket.borders)}) == 1 for bucket in padded)
        added = sum(bucket.numel for bucket in padded) - numel
        found.append((2 * equal + 2 * ranks * (len(buckets) - equal), round(1000 * added / numel)))
    assert found == expected
