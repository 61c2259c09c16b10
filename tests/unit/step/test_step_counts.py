"""Landed and skipped steps are counted, saved and resumed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    MixedPrecisionOptimizer,
)
from megascale.checkpoint import load, save
from megascale.errors import StateDictError
from tests.training import Tiny, model

Optimizer = MixedPrecisionOptimizer | ChainedOptimizer


def _replicated(module: Tiny) -> Optimizer:
    inner = torch.optim.AdamW(module.named_parameters())
    return MixedPrecisionOptimizer(inner, None, ConstantGradScaler(8.0), grads_are_scaled=True)


def _sharded(module: Tiny) -> Optimizer:
    inner = torch.optim.AdamW(module.named_parameters())
    return DistributedOptimizer(inner, None, ConstantGradScaler(8.0), modules=module, grads_are_scaled=True)


def _chain(module: Tiny) -> Optimizer:
    scaler, named = ConstantGradScaler(8.0), list(module.named_parameters())
    return ChainedOptimizer(
        [
            MixedPrecisionOptimizer(torch.optim.AdamW(part), None, scaler, grads_are_scaled=True)
            for part in (named[:3], named[3:])
        ]
    )


KINDS = [_replicated, _sharded, _chain]


def _train(module: Tiny, optimizer: Optimizer, landed: int, skipped: int) -> None:
    for step in range(landed + skipped):
        optimizer.zero_grad()
        x = torch.ones(2, 4, dtype=torch.float16) * (math.inf if step < skipped else 1.0)
        optimizer.scale_loss(module(x).float().square().mean()).backward()
        optimizer.step()


def _counts(optimizer: Optimizer) -> tuple[int, int]:
    return int(optimizer.num_landed_steps), int(optimizer.num_skipped_steps)


@pytest.mark.default("_sharded", "_chain")
@pytest.mark.parametrize("build", KINDS)
def test_counts_are_saved_and_resumed(build: Any, tmp_path: Path) -> None:
    """Through a state dict, through a checkpoint, twice in a row, into an optimizer that has stepped already."""
    module = model()
    optimizer = build(module)
    _train(module, optimizer, 3, 2)
    assert _counts(optimizer) == (3, 2)
    state = optimizer.state_dict()
    assert state["step_counts"] == {"landed": 3, "skipped": 2}
    save(tmp_path, 5, module, optimizer)

    other = model(seed=1)
    resumed = build(other)
    _train(other, resumed, 1, 1)
    resumed.load_state_dict(state)
    assert _counts(resumed) == (3, 2)
    _train(other, resumed, 1, 1)
    assert _counts(resumed) == (4, 3)
    load(tmp_path, other, resumed)
    assert _counts(resumed) == (3, 2)
    assert resumed.state_dict()["step_counts"] == {"landed": 3, "skipped": 2}


@pytest.mark.parametrize("build", KINDS)
def test_older_state_dicts_load(build: Any) -> None:
    """A state dict without counts leaves those of the optimizer alone; damaged ones are refused by name."""
    module = model()
    optimizer = build(module)
    _train(module, optimizer, 2, 1)
    state = optimizer.state_dict()
    del state["step_counts"]
    optimizer.load_state_dict(dict(state))
    assert _counts(optimizer) == (2, 1)
    for damaged in (3, {"landed": 1}, {"landed": 1.5, "skipped": 0}, {"landed": 1, "skipped": -1}):
        with pytest.raises(StateDictError, match="step_counts"):
            optimizer.load_state_dict(state | {"step_counts": damaged})
    assert _counts(optimizer) == (2, 1)
