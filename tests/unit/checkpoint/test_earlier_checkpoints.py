"""Checkpoints that commit 9dbb0b5 wrote load, and training goes on, with the bits it had there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import load
from tests.checkpoint_cases import differences
from tests.earlier_checkpoints import (
    CASES,
    LAST,
    MUON,
    OWN_ARITHMETIC,
    SAVED,
    Case,
    Optimizer,
    Weights,
    build,
    train,
    unpack,
    values,
)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints."""
    return unpack(tmp_path_factory.mktemp("earlier"))


def lost(now: Any, then: dict[str, Any]) -> list[str]:
    """Return where a state dict differs from an earlier one; it may have more entries, in another order."""
    assert set(then) <= set(now)
    return differences({key: now[key] for key in then}, then)


def loaded(folder: Path, case: Case, layout: str) -> tuple[Weights, Optimizer]:
    """Return a trained optimizer of ``layout`` into which the checkpoint was loaded."""
    weights, optimizer = build(layout, case.inner, case.dtype)
    train(layout, weights, optimizer, 20, 22)
    assert load(folder / case.folder, weights, optimizer).step == SAVED
    return weights, optimizer


def losses(folder: Path, case: Case, layout: str, ranks: int) -> list[str]:
    """Load into ``layout``, on every rank; return what differs, also after training where ranks and layout are alike.

    A replicated optimizer trains alike on any number of ranks.
    """
    expected = torch.load(folder / case.folder / "expected.pt")
    weights, optimizer = loaded(folder, case, layout)
    found = lost(optimizer.state_dict(), expected["state"]) + differences(values(weights), expected["weights"])
    goes_on = layout == case.layout and (ranks == case.ranks or layout == "replicated")
    if goes_on and case.inner not in OWN_ARITHMETIC:
        train(layout, weights, optimizer, SAVED, LAST)
        found += lost(optimizer.state_dict(), expected["later"])
        found += differences(values(weights), expected["later_weights"])
    return found


@pytest.mark.sampled(16)
@pytest.mark.native
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_an_earlier_checkpoint_loads_bitwise(earlier: Path, case: Case) -> None:
    """State, main params, scaler and weights, of one rank and of two, load into one rank's replicas and shards."""
    assert losses(earlier, case, "replicated", 1) == []
    if case.layout != "replicated":
        assert losses(earlier, case, case.layout, 1) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_an_earlier_checkpoint_holds_training(earlier: Path, case: Case) -> None:
    """What is compared is neither empty nor constant, and in fp16 a step was skipped."""
    expected = torch.load(earlier / case.folder / "expected.pt")
    assert differences(expected["weights"], values(Weights(case.dtype))) != []
    assert differences(expected["later_weights"], expected["weights"]) != []
    if case.dtype == torch.float16:
        assert expected["state"]["grad_scaler"]["scale"].item() != 64.0
        assert expected["state"]["step_counts"] == {"landed": SAVED - 1, "skipped": 1}


def test_earlier_checkpoints_hold_every_form_of_state(earlier: Path) -> None:
    """Both layouts of shards, one rank and two, remainders, 8-bit moments, and a chain with Muon are among them."""
    cases = [case for case in CASES if case.inner in ("adamw", "compact", MUON)]
    assert {(case.layout, case.ranks) for case in cases} == {
        (layout, ranks) for layout in ("replicated", "elements", "parameters") for ranks in (1, 2)
    }
    for case in cases:
        manifest = (earlier / case.folder / f"step_{SAVED:08d}" / "megascale.json").read_text()
        assert ('"dtype": "int16"' in manifest and '"dtype": "uint8"' in manifest) == (case.inner == "compact")
        assert len(list((earlier / case.folder).glob("step_*/*.distcp"))) <= case.ranks
