"""Checkpoints written by commit 8ecf6e0 load, and training goes on, with the bits it had there."""

from typing import Any

import pytest
import torch

from megascale import MixedPrecisionOptimizer
from megascale.checkpoint import load
from tests.checkpoint_cases import differences
from tests.earlier_checkpoints import CASES, DATA, LAST, OWN_STEP, SAVED, Case, Weights, build, train, values


def lost(now: Any, then: dict[str, Any]) -> list[str]:
    """Return where a state dict differs from an earlier one; it may have more entries, in another order."""
    assert set(then) <= set(now)
    return differences({key: now[key] for key in then}, then)


def loaded(case: Case, kind: str) -> tuple[Weights, MixedPrecisionOptimizer]:
    """Return a trained optimizer of ``kind`` into which the checkpoint was loaded."""
    weights, optimizer = build(kind, case.inner, case.dtype)
    train(weights, optimizer, 20, 22)
    assert load(DATA / case.folder, weights, optimizer).step == SAVED
    return weights, optimizer


@pytest.mark.native
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_an_earlier_checkpoint_loads_bitwise(case: Case) -> None:
    """State, main params, scaler and weights of one rank and of two load into one rank, and train on alike."""
    expected = torch.load(DATA / case.folder / "expected.pt")
    weights, optimizer = loaded(case, "replicated")
    assert lost(optimizer.state_dict(), expected["state"]) == []
    assert differences(values(weights), expected["weights"]) == []
    if case.kind == "replicated" and case.inner not in OWN_STEP:
        train(weights, optimizer, SAVED, LAST)
        assert lost(optimizer.state_dict(), expected["later"]) == []
        assert differences(values(weights), expected["later_weights"]) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_an_earlier_checkpoint_holds_training(case: Case) -> None:
    """What is compared is neither empty nor constant, and in fp16 a step was skipped."""
    expected = torch.load(DATA / case.folder / "expected.pt")
    assert differences(expected["weights"], values(Weights(case.dtype))) != []
    assert differences(expected["later_weights"], expected["weights"]) != []
    if case.dtype == torch.float16:
        assert expected["state"]["grad_scaler"]["scale"].item() != 64.0
