"""The layout of buckets: properties that hold for any sizes, against a brute-force oracle."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.grad_sync.layout import ParamSize, build_buckets

SIZES = st.lists(st.tuples(st.integers(0, 90), st.sampled_from(["half", "full", "expert"])), max_size=25)
SHAPES = {"num_shards": st.integers(1, 7), "bucket_numel": st.integers(1, 120), "alignment": st.sampled_from([1, 2, 8])}


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, **SHAPES)
def test_every_element_has_one_place_and_one_owner(
    sizes: list[tuple[int, str]], num_shards: int, bucket_numel: int, alignment: int
) -> None:
    """Each element of each parameter lies at exactly one position, and exactly one rank owns it, once."""
    params = [ParamSize(f"p{index}", numel, kind) for index, (numel, kind) in enumerate(sizes)]
    kind_of = {param.name: param.kind for param in params}
    owned: list[tuple[str, int]] = []
    for bucket in build_buckets(params, num_shards, bucket_numel=bucket_numel, alignment=alignment):
        assert len({kind_of[placement.name] for placement in bucket.placements}) == 1
        # The oracle: who lies at every position, written out. What is left is padding.
        positions: dict[int, tuple[str, int]] = {}
        for name, start, stop, _ in bucket.placements:
            assert positions.keys().isdisjoint(range(start, stop))
            positions |= {position: (name, position - start) for position in range(start, stop)}
        for rank in range(num_shards):
            here: dict[int, tuple[str, int]] = {}
            for name, param_start, start, stop, is_owned in bucket.pieces(rank):
                assert is_owned
                here |= {position: (name, param_start + position - start) for position in range(start, stop)}
            begin, end = bucket.borders[rank : rank + 2]
            assert here == {position: place for position, place in positions.items() if begin <= position < end}
            owned += here.values()
    assert sorted(owned) == sorted((param.name, offset) for param in params for offset in range(param.numel))


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, **SHAPES)
def test_equal_shards_tile_the_bucket(
    sizes: list[tuple[int, str]], num_shards: int, bucket_numel: int, alignment: int
) -> None:
    """Equal shards tile each bucket; parameters and shards start at multiples of the alignment."""
    params = [ParamSize(f"p{index}", numel, kind) for index, (numel, kind) in enumerate(sizes)]
    for bucket in build_buckets(params, num_shards, bucket_numel=bucket_numel, alignment=alignment):
        lengths = {end - begin for begin, end in pairwise(bucket.borders)}
        assert (bucket.borders[0], len(bucket.borders), len(lengths)) == (0, num_shards + 1, 1)
        inside = bucket.placements
        assert inside
        assert all(start % alignment == 0 for start in (*lengths, *(placement.start for placement in inside)))
        assert all(0 <= placement.start <= placement.stop <= bucket.numel for placement in inside)
        # Padding is bounded: the gaps between parameters, and less than one row of shards at the end.
        used = sum(placement.stop - placement.start for placement in inside)
        assert bucket.numel - used < num_shards * alignment + len(inside) * alignment


def test_last_parameter_is_expected_first() -> None:
    """Backward finishes the last layer first: its bucket comes first."""
    buckets = build_buckets([ParamSize(name, 10) for name in "abcd"], 2, bucket_numel=20, alignment=1)
    assert [[placement.name for placement in bucket.placements] for bucket in buckets] == [["d", "c"], ["b", "a"]]


def test_large_parameter_has_a_bucket_of_its_own() -> None:
    """A parameter larger than a bucket is not split over buckets and does not hold up its neighbours."""
    for numel, expected in ((51, [["late"], ["large"], ["small"]]), (50, [["late", "large"], ["small"]])):
        params = [ParamSize("small", 4), ParamSize("large", numel), ParamSize("late", 4)]
        names = [[p.name for p in b.placements] for b in build_buckets(params, 4, bucket_numel=50, alignment=1)]
        assert names == expected
