"""verl's real FSDP2 engine, as its registry returns it for a config that names megascale, on ranks of a CPU."""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import RankPool
from tests.training import same_bits

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("ray") is None:
    pytest.skip("needs verl and what it imports: .ci/install_integrations", allow_module_level=True)

from tests.integrations.verl_ranks import (
    BAD,
    SAVED_AT,
    STEPS,
    offload_on_rank,
    refused_on_rank,
    resume_on_rank,
    train_on_rank,
    write_model,
)

SECONDS = 200
OPTIONS = {"initial_loss_scale": 2.0**12, "hysteresis": 1}
FUSED = {"override_optimizer_config": {"fused": True, "megascale": OPTIONS}}
PLAIN = {"override_optimizer_config": {"megascale": OPTIONS}}
ASKED: dict[str, Any] = {"override_optimizer_config": {"megascale": {}}}
REMAINDERS = {"override_optimizer_config": {"megascale": {"store_param_remainders": True}}}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own: verl imports Megatron and changes classes of torch's, for a whole process."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a tiny Llama."""
    return write_model(tmp_path / "model")


def _scale(result: dict[str, Any], step: int) -> float:
    scale: float = result["scales"][step]["scaler.scale"].item()
    return scale


@pytest.mark.parametrize(
    ("weights", "computes", "options"),
    [
        ("fp16", "fp16", FUSED),
        ("bf16", "bf16", REMAINDERS),
        ("fp32", "fp16", FUSED),
    ],
    ids=["fp16", "bf16 with remainders", "autocast"],
)
def test_a_run_goes_on_after_a_restart(
    weights: str, computes: str, options: dict[str, Any], model: str, ranks: RankPool, tmp_path: Path
) -> None:
    """One name in the config asks for it; an overflow on one rank; saved on two ranks, resumed on two and four.

    On two all bits are those of the run that went on; on four main params, weights, scale, trackers and rate are what
    was saved. verl's own engine starts again at 65,536, and has files for two ranks only.
    """
    setup: Any = (model, str(tmp_path / "saved"), weights, computes, options)
    whole = ranks.run(2, train_on_rank, *setup, timeout=SECONDS)
    assert {one["kind"] for one in whole} == {"MegascaleLMEngine"}
    assert [math.isfinite(norm) for norm in whole[0]["norms"]] == [step != BAD for step in range(STEPS)]
    assert same_bits(whole[0]["at_end"], whole[1]["at_end"])
    resumed = ranks.run(2, resume_on_rank, *setup, timeout=SECONDS)
    for one, other in zip(resumed, whole, strict=True):
        assert same_bits(one["at_save"], other["at_save"])
        assert one["norms"] == other["norms"][SAVED_AT:]
        assert same_bits(one["at_end"], other["at_end"])
    for one in ranks.run(4, resume_on_rank, *setup, timeout=SECONDS):
        assert same_bits(one["at_save"], whole[0]["at_save"])
        assert all(math.isfinite(norm) for norm in one["norms"])
    if weights != "bf16":
        assert [_scale(whole[0], step) for step in range(STEPS)] == [2.0**12] + [2.0**11] * (STEPS - 1)


@pytest.mark.release
@pytest.mark.parametrize("worlds", [(4, 2), (2, 4)], ids=str)
def test_a_run_goes_on_in_new_processes_of_another_number(
    worlds: tuple[int, int], model: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Main params, weights, scale, trackers and rate are what was saved, bit for bit; ``worlds``: savers, new ranks."""
    setup: Any = (model, str(tmp_path / "saved"), "fp16", "fp16", FUSED)
    saved = ranks.run(worlds[0], train_on_rank, *setup, timeout=SECONDS)
    with ranks.spawn(worlds[1], resume_on_rank, *setup) as fresh:
        resumed = fresh.results(timeout=SECONDS)
    for one in resumed:
        assert same_bits(one["at_save"], saved[0]["at_save"])
        assert same_bits(one["at_end"], resumed[0]["at_end"])
        assert not same_bits(one["at_end"], one["at_save"])
        assert all(math.isfinite(norm) for norm in one["norms"])


def test_main_params_leave_the_device_between_rollouts(model: str, ranks: RankPool, tmp_path: Path) -> None:
    """engine.to("cpu") moves main params, too; what it saves meanwhile loads, and no bit changes."""
    setup: Any = ("fp16", "fp16", FUSED)
    stayed = ranks.run(2, train_on_rank, model, str(tmp_path / "stayed"), *setup, timeout=SECONDS)
    moved = ranks.run(2, offload_on_rank, model, str(tmp_path / "moved"), *setup, timeout=SECONDS)
    for one, other in zip(moved, stayed, strict=True):
        assert one["away"] == [True] * STEPS
        assert same_bits(one["at_end"], other["at_end"])
        assert same_bits(one["loaded"], other["at_save"])


def test_16_bits_give_the_losses_of_fp32(model: str, ranks: RankPool, tmp_path: Path) -> None:
    """Norms of fp16 weights with main params are those of fp32 weights under autocast, but for rounding."""
    norms = [
        ranks.run(1, train_on_rank, model, str(tmp_path / weights), weights, "fp16", FUSED, timeout=SECONDS)[0]["norms"]
        for weights in ("fp16", "fp32")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2, nan_ok=True)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (("fp16", "bf16", ASKED, "fsdp2"), r"weights in torch\.float16.*computes in torch\.bfloat16: set both"),
        (("fp16", "fp16", ASKED, "fsdp"), r"flattens weights in torch\.float16.*strategy: fsdp2"),
        (
            ("fp16", "fp16", {"override_optimizer_config": {"megascale": True}}, "fsdp2"),
            r"megascale must be a dict of options, such as \{\}, got True",
        ),
        (
            ("fp16", "fp16", {"override_optimizer_config": {"megascale": {"lr": 1.0}}}, "fsdp2"),
            r"lr comes from verl's configuration: set optim\.lr there",
        ),
        (
            ("fp32", "fp16", {"override_optimizer_config": {"megascale": {"exp_avg_dtype": "int8"}}}, "fsdp2"),
            r"exp_avg_dtype is for weights in 16 bits.*model_dtype: fp16",
        ),
    ],
)
def test_what_cannot_train_is_refused(setup: Any, message: str, model: str, ranks: RankPool) -> None:
    """Formats that contradict each other, FSDP1 with 16-bit weights, and options that verl's configuration decides."""
    ranks.run(1, refused_on_rank, model, message, *setup, timeout=SECONDS)


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
@pytest.mark.parametrize("options", [{}, {"override_optimizer_config": {"fused": True}}], ids=["none", "others"])
def test_without_the_name_verls_own_engine_runs(
    weights: str, options: dict[str, Any], model: str, ranks: RankPool, tmp_path: Path
) -> None:
    """An installed megascale took every run for its engine. verl's own class, optimizer and files."""
    setup: Any = (model, str(tmp_path / "saved"), weights, "bf16", options)
    [ran] = ranks.run(1, train_on_rank, *setup, timeout=SECONDS)
    assert (ran["kind"], ran["optimizer"]) == ("FSDPEngineWithLMHead", "AdamW")
    assert not (tmp_path / "saved" / "megascale").exists()
    assert not any(name.startswith("main.") for name in ran["at_end"])


def test_a_run_without_16_bits_is_verls_own(model: str, ranks: RankPool, tmp_path: Path) -> None:
    """fp32 weights that compute in bf16, verl's default, with the name: no scaler, no wrapper, no file of ours.

    What it saved loads into a run in fp16: verl's files have no scaler.
    """
    [ran] = ranks.run(1, train_on_rank, model, str(tmp_path / "saved"), "fp32", "bf16", ASKED, timeout=SECONDS)
    assert ran["optimizer"] == "AdamW"
    assert not (tmp_path / "saved" / "megascale").exists()
    assert (tmp_path / "saved" / "optim_world_size_1_rank_0.pt").exists()
    assert all(value.dtype in (torch.float32, torch.float64) for value in ran["at_end"].values())
    [resumed] = ranks.run(1, resume_on_rank, model, str(tmp_path / "saved"), "fp32", "fp16", PLAIN, timeout=SECONDS)
    assert all(torch.equal(resumed["at_save"][name], value) for name, value in ran["at_save"].items())
    assert _scale(resumed, 0) == 2.0**12


def test_adapters_over_a_frozen_base_go_on_after_a_restart(model: str, ranks: RankPool, tmp_path: Path) -> None:
    """LoRA: adapters in fp16 have main params, the base in fp16 has none and does not move; two ranks, then four."""
    setup: Any = (model, str(tmp_path / "saved"), "fp16", "fp16", PLAIN, "fsdp2", 2)
    whole = ranks.run(2, train_on_rank, *setup, timeout=SECONDS)
    [saved, ended] = [whole[0][time] for time in ("at_save", "at_end")]
    assert all("lora" in name for name in saved if name.startswith("main."))
    assert any(name.startswith("main.") for name in saved)
    moved = {name for name in saved if not torch.equal(saved[name], ended[name]) and name.startswith("weight.")}
    assert moved
    assert all("lora" in name for name in moved)
    for one, other in zip(ranks.run(2, resume_on_rank, *setup, timeout=SECONDS), whole, strict=True):
        assert same_bits(one["at_save"], other["at_save"])
        assert same_bits(one["at_end"], other["at_end"])
    for one in ranks.run(4, resume_on_rank, *setup, timeout=SECONDS):
        assert same_bits(one["at_save"], saved)
