"""Constructions of many ranks, compared without any."""

import pickle
from collections.abc import Sequence

import pytest

from megascale.errors import ArgumentError
from megascale.grad_sync.construction import Construction, _compact, _require_alike


def _built(ranks: Sequence[int]) -> Construction:
    return Construction("GradSync", groups={"data_parallel": _compact(ranks)})


@pytest.mark.parametrize("ranks", [[0], [3, 5], [0, 8, 16, 24], [0, 1, 8, 9], list(range(10_000))])
def test_groups_are_told_in_few_bytes(ranks: list[int]) -> None:
    """All ranks tell all of theirs: evenly spaced ones are a range, and no rank is lost."""
    assert list(_compact(ranks)) == ranks
    assert len(pickle.dumps(_compact(ranks))) < 100


def test_groups_that_overlap_are_found_and_told_in_short() -> None:
    """Groups apart from one another are alike; a rank that leaves out some of another rank's group is named."""
    halves = [range(8), range(8, 16)]
    _require_alike({rank: _built(halves[rank // 8]) for rank in range(16)})
    built = {rank: _built(range(16)) for rank in range(16)}
    built[9] = _built([8, 9])
    with pytest.raises(ArgumentError) as caught:
        _require_alike(built)
    assert str(caught.value).startswith(
        "groups.data_parallel is ranks [8, 9] on rank 9 and ranks [0, 1, 2, 3, 4, 5, 6, 7] and 8 more on rank 15, but"
    )
    built = {rank: _built(range(8)) for rank in range(8)} | {1: _built([0, 1])}
    with pytest.raises(ArgumentError, match=r"rank 1 and ranks \[0, 1, 2, 3, 4, 5, 6, 7\] on rank 7"):
        _require_alike(built)


@pytest.mark.parametrize("longer", [0, 1])
def test_a_parameter_of_one_rank_alone_is_named(longer: int) -> None:
    """At the end of a list the other rank has none in its place."""
    forms = [("a", "torch.float32", (2,), "cpu"), ("b", "torch.float16", (3, 4), "cpu")]
    built = {rank: Construction("GradSync", parameters={"modules": forms[: 1 + (rank == longer)]}) for rank in (0, 1)}
    values = ["absent", "absent"]
    values[longer] = "'b' (torch.float16, shape (3, 4), cpu)"
    with pytest.raises(ArgumentError) as caught:
        _require_alike(built)
    assert str(caught.value).startswith(f"parameter 1 of modules is {values[0]} on rank 0 and {values[1]} on rank 1, ")
