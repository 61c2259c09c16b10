"""Estimates beside what runs on 1, 2 and 4 ranks hold and write."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale import estimate
from megascale.estimation import PRECISIONS, SHARDINGS
from tests.cells import Given
from tests.estimation_cases import MATRICES, measure
from tests.pool import RankPool

# What the native backend holds; the torch backend makes tensors that it keeps.
pytestmark = pytest.mark.native

BF16 = torch.bfloat16
PIECE_BYTES = 2_500
"""What a saved piece takes beside its elements, which an estimate leaves out."""
WHOLE_GROUPS = ((512, 640), (1_024,), (256, 1_024), (64,), (64, 64), (1_024, 512), (128,))
"""Shapes that FSDP2 may cut on two ranks where moments are codes: each part is whole groups of 32 elements."""


def compare(
    ranks: RankPool,
    folder: Path,
    precision: str,
    sharding: str,
    optimizer: str,
    world: int,
    options: Mapping[str, Any],
    shapes: tuple[tuple[int, ...], ...] = MATRICES,
) -> None:
    """Hold an estimate against every rank's measurement: 2 % of bytes, and the few bytes per tensor of counts."""
    measured = ranks.run(world, measure, shapes, precision, sharding, optimizer, dict(options), str(folder))
    with torch.device("meta"):
        model = Given(shapes)
    setup: dict[str, Any] = {"sharding": sharding, "optimizer": optimizer, "ranks": world}
    found = estimate(model, precision=precision, **setup, **options)
    for kind in measured[0].held:
        held = [real.held[kind] for real in measured]
        assert max(held) == pytest.approx(found.held[kind], rel=0.02, abs=2000), kind
    pieces = 6 * len(shapes) * world  # at most: weight, main param, two moments and their scales, on each rank
    assert measured[0].checkpoint == pytest.approx(found.checkpoint, rel=0.02, abs=PIECE_BYTES * pieces)


@pytest.mark.default("bf16-grad_sync-2")
@pytest.mark.parametrize(
    ("precision", "sharding", "world"),
    [*product(PRECISIONS, SHARDINGS, (2,)), *product(["bf16"], SHARDINGS, (1, 4))],
)
def test_estimate_is_what_a_run_needs(
    ranks: RankPool, tmp_path: Path, precision: str, sharding: str, world: int
) -> None:
    """Memory of each kind, and the checkpoint, are within 2 %."""
    compare(ranks, tmp_path, precision, sharding, "adamw", world, {})


@pytest.mark.release
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("optimizer", ["adam", "amsgrad", "sgd", "momentum", "lion"])
def test_estimate_knows_the_optimizers(ranks: RankPool, tmp_path: Path, sharding: str, optimizer: str) -> None:
    """Moments of 16 bit too, of each optimizer that has them."""
    options = {} if optimizer == "sgd" else {"exp_avg_dtype": BF16}
    options |= {"exp_avg_sq_dtype": torch.float16} if optimizer in ("adam", "amsgrad") else {}
    compare(ranks, tmp_path, "fp16", sharding, optimizer, 2, options)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("remainders", [False, True])
def test_estimate_knows_compact_state(ranks: RankPool, tmp_path: Path, sharding: str, remainders: bool) -> None:
    """Codes with their scales, and main params of 2 bytes."""
    codes = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
    options: dict[str, Any] = {**codes, "store_param_remainders": remainders}
    compare(ranks, tmp_path, "bf16", sharding, "adamw", 2, options, WHOLE_GROUPS)


@pytest.mark.release
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_estimate_knows_muon(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    """Matrices have one moment, all else has AdamW's two. On one rank, where no rank holds more than another."""
    compare(ranks, tmp_path, precision, "ddp", "muon", 1, {})
    compare(ranks, tmp_path / "sharded", precision, "zero1", "muon", 1, {})


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["grad_sync", "zero1"])
def test_estimate_knows_the_dtype_of_main_grads(ranks: RankPool, tmp_path: Path, sharding: str) -> None:
    """Of 16 bits."""
    compare(ranks, tmp_path, "bf16", sharding, "adamw", 2, {"grad_dtype": BF16})
