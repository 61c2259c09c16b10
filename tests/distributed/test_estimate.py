"""Estimates beside what runs on 1, 2 and 4 ranks hold, send and write."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale import estimate
from megascale.estimation.setup import MOMENTS, SHARDINGS
from megascale.estimation.sizes import PRECISIONS
from tests.cases import cases
from tests.estimation_cases import BUCKET, measure, shapes_for
from tests.pool import RankPool

# What the native backend holds; the torch backend makes tensors of its own in a step.
pytestmark = pytest.mark.native

QUICK = {("fp16", "distributed", "adamw", 2), ("bf16", "grad_sync", "adamw", 2), ("fp32", "replicated", "adamw", 2)}
BF16 = torch.bfloat16


def compare(
    ranks: RankPool, folder: Path, precision: str, sharding: str, optimizer: str, world: int, **options: Any
) -> None:
    """Hold an estimate against every rank's measurement: 2 % of bytes, all of the messages."""
    measured = ranks.run(world, measure, precision, sharding, optimizer, options, str(folder))
    for rank, real in enumerate(measured):
        found = estimate(
            shapes_for(optimizer),
            precision=precision,
            sharding=sharding,
            optimizer=optimizer,
            ranks=world,
            rank=rank,
            bucket_numel=BUCKET,
            communication="gloo",
            **options,
        )
        reducer = found.held["messages"] if sharding == "replicated" else 0  # in C++, seen at the peak
        for kind, nbytes in found.held.items():
            expected = nbytes - (reducer if kind == "messages" else 0)
            assert real.held[kind] == pytest.approx(expected, rel=0.02, abs=1000), (rank, kind)
        assert sum(real.held.values()) + reducer == pytest.approx(found.total, rel=0.02)
        if not found.transient.get("payloads of reductions"):  # threads free them that the profiler does not see
            assert real.peak == pytest.approx(found.peak, rel=0.02)
        assert real.checkpoint == pytest.approx(found.checkpoint, rel=0.02)
        by_ddp = {"all_reduce"} if sharding == "replicated" else set()
        sent = [c for c in found.collectives if c.operation not in by_ddp or c.purpose.startswith("agree")]
        for operation, name in (("all_reduce", "all_reduce"), ("send", "isend")):
            chosen = [c for c in sent if c.operation == operation]
            assert real.calls.get(name, 0) == sum(c.count for c in chosen)
            assert real.payload.get(name, 0) == sum(c.payload for c in chosen)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("precision", "sharding", "optimizer", "world"),
    cases(PRECISIONS, SHARDINGS, ("adamw", "momentum"), (1, 2, 4), quick=lambda *case: case in QUICK),
)
def test_estimate_is_what_a_run_needs(
    ranks: RankPool, tmp_path: Path, precision: str, sharding: str, optimizer: str, world: int
) -> None:
    """Memory of each kind, the peak and the checkpoint are within 2 %; messages are exact."""
    compare(ranks, tmp_path, precision, sharding, optimizer, world)


@pytest.mark.weekly
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("optimizer", ["adam", "amsgrad", "sgd", "lion"])
def test_estimate_knows_the_optimizers(ranks: RankPool, tmp_path: Path, sharding: str, optimizer: str) -> None:
    """Moments of 16 bit too, of each optimizer."""
    options = {"exp_avg_dtype": BF16} if "exp_avg" in MOMENTS[optimizer] else {}
    options |= {"exp_avg_sq_dtype": torch.float16} if "exp_avg_sq" in MOMENTS[optimizer] else {}
    compare(ranks, tmp_path, "fp16", sharding, optimizer, 2, **options)


@pytest.mark.weekly
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_estimate_knows_moments_of_8_bits(ranks: RankPool, tmp_path: Path, sharding: str, optimizer: str) -> None:
    """Codes and their scales; Lion counts steps then."""
    options = {"exp_avg_dtype": torch.int8}
    options |= {"exp_avg_sq_dtype": torch.uint8} if optimizer == "adamw" else {}
    compare(ranks, tmp_path, "fp16", sharding, optimizer, 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_estimate_knows_remainders(ranks: RankPool, tmp_path: Path, sharding: str) -> None:
    """Main params of 2 bytes; a checkpoint holds 4."""
    compare(ranks, tmp_path, "bf16", sharding, "adamw", 2, store_param_remainders=True)


@pytest.mark.weekly
@pytest.mark.parametrize(("optimizer", "shard"), [("adamw", "parameters"), ("muon", "auto")])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_estimate_knows_whole_parameters(
    ranks: RankPool, tmp_path: Path, optimizer: str, shard: str, world: int
) -> None:
    """Shards of whole parameters, and Muon with AdamW for what is not a hidden matrix: uneven, rank by rank."""
    compare(ranks, tmp_path, "fp16", "distributed", optimizer, world, shard=shard)


@pytest.mark.weekly
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_estimate_knows_muon_alone(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    """On one rank."""
    compare(ranks, tmp_path, precision, "replicated", "muon", 1)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["grad_sync", "distributed"])
@pytest.mark.parametrize(
    "options", [{"reduce_dtype": BF16}, {"grad_dtype": BF16}, {"grad_dtype": BF16, "reduce_dtype": torch.float32}]
)
def test_estimate_knows_the_dtypes_of_messages(
    ranks: RankPool, tmp_path: Path, sharding: str, options: dict[str, torch.dtype]
) -> None:
    """Main grads and messages of other dtypes, with the scratch that a conversion takes."""
    compare(ranks, tmp_path, "bf16", sharding, "adamw", 2, **options)
