"""Constructions of many ranks, compared without any."""

import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from megascale.errors import ArgumentError
from megascale.grad_sync.construction import KIND, Construction, _compact, param_forms, require_alike


def _built(ranks: Sequence[int]) -> Construction:
    return Construction({KIND: "a GradSync"}, {"data_parallel": _compact(ranks)}, {})


@pytest.mark.parametrize("ranks", [[0], [3, 5], [0, 8, 16, 24], [0, 1, 8, 9], list(range(10_000))])
def test_groups_are_told_in_few_bytes(ranks: list[int]) -> None:
    """All ranks tell all of theirs: evenly spaced ones are a range, and no rank is lost."""
    assert list(_compact(ranks)) == ranks
    assert len(pickle.dumps(_compact(ranks))) < 100


def test_groups_that_overlap_are_found_and_told_in_short() -> None:
    """Groups apart from one another are alike; a rank that leaves out some of another rank's group is named."""
    halves = [range(8), range(8, 16)]
    require_alike({rank: _built(halves[rank // 8]) for rank in range(16)})
    built = {rank: _built(range(16)) for rank in range(16)}
    built[9] = _built([8, 9])
    with pytest.raises(ArgumentError) as caught:
        require_alike(built)
    assert str(caught.value).startswith(
        "groups.data_parallel is range(0, 16) on rank 15 and range(8, 10) on rank 9, but"
    )
    built = {rank: _built(range(8)) for rank in range(8)} | {1: _built([0, 1])}
    with pytest.raises(ArgumentError, match=r"range\(0, 8\) on rank 7 and range\(0, 2\) on rank 1"):
        require_alike(built)


@pytest.mark.parametrize("longer", [0, 1])
def test_a_parameter_of_one_rank_alone_is_named(longer: int) -> None:
    """At the end of a list the other rank has none in its place."""
    params = {"a": torch.ones(2), "b": torch.ones(3, 4).half()}
    named = [(name, nn.Parameter(value)) for name, value in params.items()]
    built = {rank: Construction(param_forms("modules", named[: 1 + (rank == longer)]), {}, {}) for rank in (0, 1)}
    values = ["nothing", "nothing"]
    values[longer] = "'b' (torch.float16, shape (3, 4), cpu)"
    with pytest.raises(ArgumentError) as caught:
        require_alike(built)
    assert str(caught.value).startswith(f"parameter 1 of modules is {values[0]} on rank 0 and {values[1]} on rank 1, ")
