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
