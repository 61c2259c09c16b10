"""The layout of flat buffers: properties that hold for any sizes, against a brute-force oracle."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.errors import ArgumentError
from megascale.grad_sync.layout import BufferLayout, ParamSize, Piece, build_layouts

SIZES = st.lists(st.tuples(st.integers(0, 90), st.sampled_from(["half", "full", "expert"])), max_size=25)
SHAPES = {"num_shards": st.integers(1, 7), "bucket_numel": st.integers(1, 120), "alignment": st.sampled_from([1, 2, 8])}


def _params(sizes: list[tuple[int, str]]) -> list[ParamSize]:
    return [ParamSize(f"p{index}", numel, kind) for index, (numel, kind) in enumerate(sizes)]


def _map_of(layout: BufferLayout) -> list[tuple[str, int] | None]:
    """The oracle: who lies at every position, written out."""
    positions: list[tuple[str, int] | None] = [None] * layout.numel
    for placement in layout.placements:
        for offset in range(placement.stop - placement.start):
            assert positions[placement.start + offset] is None
            positions[placement.start + offset] = placement.name, offset
    return positions


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, **SHAPES)
def test_every_element_has_one_place_and_one_owner(
    sizes: list[tuple[int, str]], num_shards: int, bucket_numel: int, alignment: int
) -> None:
    """Each element of each parameter lies at exactly one position, and exactly one rank owns it, once."""
    params = _params(sizes)
    layouts = build_layouts(params, num_shards, bucket_numel=bucket_numel, alignment=alignment)
    assert {layout.kind for layout in layouts} == {param.kind for param in params}
    for layout in layouts:
        expected = {(p.name, offset) for p in params if p.kind == layout.kind for offset in range(p.numel)}
        positions = _map_of(layout)
        assert {place for place in positions if place is not None} == expected
        owned = []
        for rank in range(num_shards):
            for bucket in layout.buckets:
                start, stop = layout.shard(bucket, rank)
                for piece in layout.pieces(start, stop):
                    assert start <= piece.start < piece.start + piece.numel <= stop
                    owned += [(piece.name, offset) for offset in range(piece.param_start, piece.param_stop)]
                    assert positions[piece.start] == (piece.name, piece.param_start)
        assert len(owned) == len(set(owned))
        assert set(owned) == expected


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, **SHAPES)
def test_buckets_and_shards_tile_the_buffer(
    sizes: list[tuple[int, str]], num_shards: int, bucket_numel: int, alignment: int
) -> None:
    """Buckets tile the buffer, equal shards tile each bucket, and all start at multiples of the alignment."""
    for layout in build_layouts(_params(sizes), num_shards, bucket_numel=bucket_numel, alignment=alignment):
        assert [bucket.start for bucket in layout.buckets] == [0, *(bucket.stop for bucket in layout.buckets[:-1])]
        for bucket in layout.buckets:
            shards = [layout.shard(bucket, rank) for rank in range(num_shards)]
            assert [start for start, _ in shards] == [bucket.start, *(stop for _, stop in shards[:-1])]
            assert shards[-1][1] == bucket.stop
            assert all(start % alignment == 0 and stop - start == shards[0][1] - shards[0][0] for start, stop in shards)
            inside = bucket.placements
            assert inside
            assert all(bucket.start <= placement.start <= placement.stop <= bucket.stop for placement in inside)
            # Padding is bounded: the gaps between parameters, and less than one row of shards at the end.
            used = sum(placement.stop - placement.start for placement in inside)
            assert bucket.numel - used < num_shards * alignment + len(inside) * alignment
        assert all(placement.start % alignment == 0 for placement in layout.placements)
        assert sum(bucket.numel for bucket in layout.buckets) == layout.numel


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES, data=st.data(), **SHAPES)
def test_ranges_map_to_names(
    sizes: list[tuple[int, str]], data: st.DataObject, num_shards: int, bucket_numel: int, alignment: int
) -> None:
    """Any range yields exactly the pieces that the written-out map has there."""
    for layout in build_layouts(_params(sizes), num_shards, bucket_numel=bucket_numel, alignment=alignment):
        positions = _map_of(layout)
        start = data.draw(st.integers(0, layout.numel))
        stop = data.draw(st.integers(start, layout.numel))
        found: list[tuple[str, int] | None] = [None] * (stop - start)
        for piece in layout.pieces(start, stop):
            for offset in range(piece.numel):
                found[piece.start - start + offset] = piece.name, piece.param_start + offset
        assert found == positions[start:stop]


def test_last_parameter_is_expected_first() -> None:
    """Backward finishes the last layer first: its bucket comes first."""
    [layout] = build_layouts([ParamSize(name, 10) for name in "abcd"], 2, bucket_numel=20, alignment=1)
    assert [placement.name for placement in layout.placements] == ["d", "c", "b", "a"]
    assert [(bucket.start, bucket.stop) for bucket in layout.buckets] == [(0, 20), (20, 40)]


def test_large_parameter_has_a_bucket_of_its_own() -> None:
    """A parameter larger than a bucket is not split over buckets and does not hold up its neighbours."""
    for numel, expected in ((51, [["late"], ["large"], ["small"]]), (50, [["late", "large"], ["small"]])):
        params = [ParamSize("small", 4), ParamSize("large", numel), ParamSize("late", 4)]
        [layout] = build_layouts(params, 4, bucket_numel=50, alignment=1)
        names = [[p.name for p in b.placements] for b in layout.buckets]
        assert names == expected


REFUSED = [
    ([ParamSize("a", 1), ParamSize("a", 2)], {}, "two parameters are called 'a'"),
    ([ParamSize("a", -1)], {}, "numel of 'a' must be 0 or more, got -1"),
    ([], {"num_shards": 0}, "num_shards must be 1 or more, got 0"),
    ([], {"bucket_numel": 1.5}, "bucket_numel must be an integer, got 1.5"),
    ([], {"alignment": True}, "alignment must be an integer, got True"),
]


@pytest.mark.parametrize(("params", "options", "message"), REFUSED)
def test_bad_sizes_are_refused(params: list[ParamSize], options: dict[str, int], message: str) -> None:
    """Every argument is checked by name."""
    with pytest.raises(ArgumentError, match=message):
        build_layouts(params, **({"num_shards": 2} | options))


def test_padding_belongs_to_nobody() -> None:
    """Also where a parameter begins right behind it."""
    [layout] = build_layouts([ParamSize("first", 4), ParamSize("last", 7)], 1, alignment=8)
    assert [list(layout.pieces(position, position + 1)) for position in (6, 7, 8)] == [
        [Piece("last", 6, 7, 6)],
        [],
        [Piece("first", 0, 1, 8)],
    ]
