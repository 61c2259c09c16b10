"""Checkpoints written by commit 8ecf6e0 load on two ranks, whoever wrote them, and sharded training goes on bitwise."""

import pytest
import torch

from tests.checkpoint_cases import differences
from tests.earlier_checkpoints import CASES, DATA, LAST, OWN_STEP, SAVED, Case, train, values
from tests.pool import RankPool
from tests.unit.checkpoint.test_earlier_checkpoints import loaded, lost


def _losses(case: Case) -> list[str]:
    expected = torch.load(DATA / case.folder / "expected.pt")
    weights, optimizer = loaded(case, "sharded")
    found = lost(optimizer.state_dict(), expected["state"]) + differences(values(weights), expected["weights"])
    if case.kind == "sharded" and case.inner not in OWN_STEP:
        train(weights, optimizer, SAVED, LAST)
        found += lost(optimizer.state_dict(), expected["later"])
        found += differences(values(weights), expected["later_weights"])
    return found


QUICK = ("adamw", "adagrad")
PARAMS = [pytest.param(one, marks=() if one.inner in QUICK else pytest.mark.slow, id=one.folder) for one in CASES]


@pytest.mark.native
@pytest.mark.parametrize("case", PARAMS)
def test_an_earlier_checkpoint_loads_on_two_ranks(ranks: RankPool, case: Case) -> None:
    """Replicated and sharded ones, of each optimizer, into a DistributedOptimizer of two ranks."""
    assert ranks.run(2, _losses, case) == [[], []]
