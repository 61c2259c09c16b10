"""Estimates from sizes alone: of huge models, of a module and a number, on the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import estimate
from megascale.cli import main
from megascale.cli.estimate import SMALLER, model_of
from megascale.config import COMPACT_STATE
from megascale.errors import ArgumentError
from megascale.estimation import ELSEWHERE, SHARDINGS
from tests.counting import OperatorCounter

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("setup", "on_device", "in_host_memory"),
    [
        ({}, 16, 0),
        ({"optimizer": "sgd"}, 8, 0),
        ({"optimizer": "momentum"}, 12, 0),
        ({"optimizer": "amsgrad"}, 20, 0),
        ({"optimizer": "muon"}, 12, 0),
        (COMPACT_STATE, 8.25, 0),
        ({"optimizer_cpu_offload": True}, 4, 16),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, 10, 8),
        (COMPACT_STATE | {"optimizer_cpu_offload": True}, 4, 8.25),
        ({"ranks": 8}, 18, 0),
        ({"ranks": 8, "sharding": "grad_sync"}, 18, 0),
        ({"ranks": 8, "sharding": "zero1"}, 7.5, 0),
        ({"ranks": 8, "sharding": "zero1", "grad_dtype": torch.bfloat16}, 5.5, 0),
        ({"ranks": 8, "sharding": "zero1", "optimizer_cpu_offload": True}, 6, 18 / 8),
        ({"ranks": 8, "sharding": "fsdp2"}, 2, 0),
        (COMPACT_STATE | {"ranks": 8, "sharding": "fsdp2"}, 8.25 / 8, 0),
        ({"ranks": 8, "sharding": "fsdp2", "optimizer_cpu_offload": True}, 0.5, 2),
    ],
    ids=str,
)
def test_bytes_per_16_bit_parameter(setup: dict[str, Any], on_device: float, in_host_memory: float) -> None:
    """By hand: weight 2, gradient 2 or main grad 4, main param 4, a moment 4, or codes; cut over ranks or moved."""
    found = estimate(64_000, **setup)
    assert found.total == pytest.approx(64_000 * on_device)
    assert sum(found.host.values()) == pytest.approx(64_000 * in_host_memory)
    assert estimate(64_000, precision="fp32").total == 16 * 64_000


def test_huge_model_on_many_ranks_allocates_nothing() -> None:
    """1e12 parameters on 1,024 ranks: no operator makes a tensor."""
    with OperatorCounter() as operators:
        found = estimate(10**12, ranks=1024, sharding="zero1")
    assert set(operators.counts) <= {torch.ops.aten.promote_types.default}
    assert found.total == pytest.approx(6e12 + 12e12 / 1024)
    assert found.checkpoint == 14 * 10**12


def test_the_largest_shard_is_counted() -> None:
    """FSDP2 cuts rows, so that the first of four ranks holds 9 of 33; ZeRO-1 cuts elements."""
    model = nn.Linear(47, 33, bias=False)
    assert estimate(model, ranks=4, sharding="fsdp2").held["model params"] == 2 * 9 * 47
    assert estimate(model, ranks=4, sharding="zero1").held["main params"] == 4 * -(-33 * 47 // 4)


def test_frozen_parameters_and_buffers_count() -> None:
    """A frozen parameter has no gradient and no state; buffers keep their dtype. Muon takes the matrix alone."""
    module = nn.Sequential(layer := nn.Linear(64, 32), nn.BatchNorm1d(32))
    assert estimate(module, optimizer="muon").held["moments"] == 4 * 64 * 32 + 8 * 32 * 3
    layer.weight.requires_grad_(False)
    found = estimate(module)
    trained = 32 * 3
    assert found.numel == trained
    assert found.held["frozen and buffers"] == 2 * 64 * 32 + 4 * 64 + 8
    assert found.held["gradients"] == 2 * trained
    assert estimate(module, precision="as_is").held["model params"] == 4 * trained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 0}, "number of parameters must be 1 or more, got 0"),
        ({"model": nn.Identity()}, "no parameter that is trained"),
        ({"model": 1.5}, "model must be a torch.nn.Module or a number of parameters"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"precision": "as_is"}, "needs a module"),
        ({"sharding": "fsdp3"}, "sharding must be one of .*, got 'fsdp3'$"),
        ({"ranks": 0}, "ranks must be 1 or more"),
        ({"optimizer": "shampoo"}, "optimizer must be one of"),
        ({"exp_avg_dtype": torch.int16}, "exp_avg_dtype must be one of"),
        ({"exp_avg_dtype": torch.int8, "optimizer": "sgd"}, "exp_avg_dtype=torch.int8 needs an optimizer .*, not sgd"),
        ({"exp_avg_sq_dtype": torch.uint8, "optimizer": "lion"}, "exp_avg_sq_dtype=torch.uint8 needs .*, not lion"),
        ({"grad_dtype": "bf16"}, "grad_dtype must be a floating point"),
        ({"optimizer_offload_fraction": 0.5}, "optimizer_offload_fraction needs optimizer_cpu_offload=True"),
        ({"shards": 2}, r"argument of estimate\(\) must be one of"),
    ],
)
def test_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    """Every argument that cannot be used is named, with its value and what it may be."""
    with pytest.raises((ArgumentError, TypeError), match=message):
        estimate(**({"model": 100} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch.json"], "'nosuch.json' is neither a number of parameters, such as 7B or 7e9"),
        (["Qwen/Qwen2-7B"], "a model of the hub is not downloaded"),
        (["7X"], "'7X' is neither a number of parameters"),
        (["nan"], "must be a number of parameters"),
        (["1e19"], "1 or more and less than 2**63"),
        (["7B", "--gpu", "h1000"], "--gpu must be one of h100, h200"),
        (["7B", "--gpu", "0"], "or its memory in GB, got '0'"),
        (["100", "--ranks", "0"], "--ranks must be 1 or more"),
        (["100", "--optimizer-offload-fraction", "0.5"], "--optimizer-offload-fraction needs"),
    ],
)
def test_command_names_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the argument as it was typed."""
    assert main(["estimate", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "numel"), [("7B", 7e9), ("70b", 7e10), ("124M", 1.24e8), ("1.5K", 1500), ("1T", 1e12), ("7e9", 7e9)]
)
def test_numbers_of_parameters_as_models_are_called(text: str, numel: float) -> None:
    """7B is a number of parameters, not a file."""
    assert model_of(text) == numel


@pytest.mark.slow
def test_a_hugging_face_config_is_built_by_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file or its folder, on the meta device. Without transformers one line says what to give instead."""
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 50257}))
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, "transformers", None)
        assert main(["estimate", str(tmp_path)]) == 1
        assert "install it, or give the number of parameters" in capsys.readouterr().err
    pytest.importorskip("transformers")
    for given in (tmp_path, tmp_path / "config.json"):
        assert main(["estimate", str(given)]) == 0
        assert capsys.readouterr().out.startswith("124,439,808 parameters")
    (tmp_path / "config.json").write_text('{"model_type": "nosuch"}')
    assert main(["estimate", str(tmp_path)]) == 1
    assert "cannot be built: " in capsys.readouterr().err


def test_does_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """`--gpu` answers yes with what is left; or no with what lacks, and with options that fit when they are typed."""
    assert main(["estimate", "1B", "--gpu", "h100"]) == 0
    assert "Does it fit? (H100, 80 GB)\n  yes: 64.0 GB per rank are left" in capsys.readouterr().out
    assert main(["estimate", "7B", "--gpu", "80"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"Does it fit\? \(80 GB\)\n  no: 32.0 GB per rank too much.*(\n  fits with .*){4}$", said.rstrip())
    for typed in re.findall("^  fits with (.*):", said, flags=re.MULTILINE):
        assert main(["estimate", "7B", "--gpu", "80", *typed.split()]) == 0
        assert "  yes: " in capsys.readouterr().out
    assert main(["estimate", "100T", "--gpu", "t4"]) == 0
    assert "take a larger card" in capsys.readouterr().out


def _rows(head: str) -> list[list[str]]:
    """Return the cells of the table of docs/memory.md whose first line begins so."""
    lines = (ROOT / "docs/memory.md").read_text().split(f"\n| {head} | ")[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_other_systems_names_of_shardings() -> None:
    """The page has the code's table; case, ``-`` and ``_`` do not matter. What is none of them is refused."""
    rows = {row[0].strip("`"): re.findall(r"`(\w+)`", row[1]) for row in _rows("`sharding`")}
    assert rows == {ours: [*ELSEWHERE.get(ours, ())] for ours in SHARDINGS}
    for ours, theirs in rows.items():
        assert {estimate(10, sharding=name).setup.sharding for name in (ours, *theirs)} == {ours}
    assert estimate(10, sharding="ZeRO-3") == estimate(10, sharding="FullShard") == estimate(10, sharding="fsdp2")


SHARDING_OF = {"": "ddp", "FSDP2": "fsdp2", "`DistributedOptimizer`": "zero1"}
OFFLOAD = {"optimizer_cpu_offload": True}


@pytest.mark.parametrize("row", _rows("model"), ids=lambda row: f"{row[0]} on {row[1]}")
def test_advice_is_the_pages_table(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes are the estimates', its marks what `--gpu` advises on these GPUs. Offloading comes last."""
    model, (gpus, _, sharding) = row[0], row[1].partition(", ")
    ranks, _, card = gpus.removesuffix(" GB").partition(" x ")
    setup: dict[str, Any] = {"ranks": int(ranks), "sharding": SHARDING_OF[sharding]}
    plain, compact, offload, small = (
        estimate(model_of(model), **setup, **changes)
        for changes in ({}, COMPACT_STATE, OFFLOAD, OFFLOAD | COMPACT_STATE | {"store_param_remainders": False})
    )
    marks = ["✓ " * (one.total <= float(card) * 1e9) for one in (plain, compact, offload)]
    totals = [f"{mark}{one.total / 1e9:.1f}" for mark, one in zip(marks, (plain, compact, offload), strict=True)]
    assert row[2:] == [*totals, *(f"{sum(one.host.values()) / 1e9:.0f}" for one in (offload, small))]
    assert main(["estimate", model, "--ranks", ranks, "--sharding", SHARDING_OF[sharding], "--gpu", card]) == 0
    advised = re.findall(r"^  fits with (.*):", capsys.readouterr().out, flags=re.MULTILINE)
    here = "" if ranks == "1" else f"--ranks {ranks} --sharding {SHARDING_OF[sharding]}"
    typed = [f"{here} {options}".strip() for options in SMALLER]
    assert [one for one in advised if one in typed] == [one for one, mark in zip(typed, marks, strict=True) if mark]
    assert ["offload" in one for one in advised] == sorted("offload" in one for one in advised)


def test_the_pages_picture_of_bytes_per_parameter() -> None:
    """docs/assets/bytes_per_parameter.svg: its numbers are the estimates, on one GPU and sharded over eight."""
    remainders: dict[str, Any] = {"store_param_remainders": True}
    moments: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
    rows: list[dict[str, Any]] = [{"precision": "fp32"}, {}, remainders, moments, remainders | moments]
    layouts: list[dict[str, Any]] = [{}, {"ranks": 8, "sharding": "zero1"}]
    held = [sum(estimate(10**9, **row, **layout).held.values()) for layout in layouts for row in rows]
    expected = [f"{round(nbytes / 1e9, 2):g}" for nbytes in held]
    picture = ROOT / "docs/assets/bytes_per_parameter.svg"
    assert re.findall(r">([0-9.]+)</text>", picture.read_text()) == expected
