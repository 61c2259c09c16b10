"""Checkpoints that commit 9dbb0b5 wrote load on two ranks, and training goes on, with the bits it had there."""

from pathlib import Path

import pytest

from tests.earlier_checkpoints import CASES, INNER, MUON, OWN_ARITHMETIC, Case
from tests.pool import RankPool
from tests.unit.checkpoint.test_earlier_checkpoints import earlier, losses

__all__ = ["earlier"]  # a fixture of this file, too
QUICK = ("adamw", "compact", MUON)


def _layouts(inner: str) -> list[str]:
    """Return the layouts into which a checkpoint of ``inner`` loads."""
    by_elements = inner != MUON and not (inner in INNER and inner in OWN_ARITHMETIC)
    return ["replicated", *(["elements"] if by_elements else []), "parameters"]


PARAMS = [
    pytest.param(
        case,
        layout,
        marks=() if case.inner in QUICK and layout == case.layout else pytest.mark.slow,
        id=f"{case.folder}-{layout}",
    )
    for case in CASES
    for layout in _layouts(case.inner)
]


@pytest.mark.sampled(5)
@pytest.mark.native
@pytest.mark.parametrize(("case", "layout"), PARAMS)
def test_an_earlier_checkpoint_loads_on_two_ranks(ranks: RankPool, earlier: Path, case: Case, layout: str) -> None:
    """Those of every layout load into every layout, whoever saved them."""
    assert ranks.run(2, losses, earlier, case, layout, 2) == [[], []]
