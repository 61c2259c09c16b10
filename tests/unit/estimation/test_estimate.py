"""Estimates from sizes alone: of huge models, of every form of a model, on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import estimate
from megascale.cli import main
from megascale.cli.estimate import model_of
from megascale.errors import ArgumentError
from tests.counting import OperatorCounter


def make() -> nn.Module:
    """Return the model that the command line is given."""
    return nn.Linear(64, 32)


def test_huge_model_on_many_ranks_allocates_nothing() -> None:
    """1e12 parameters on 1,024 ranks: no operator makes a tensor; bytes are what arithmetic says, within 0.1 %."""
    with OperatorCounter() as operators:
        found = estimate(10**12, ranks=1024, sharding="distributed", memory_bandwidth=3e12, link_bandwidth=1e11)
    assert set(operators.counts) <= {torch.ops.aten.promote_types.default}
    expected = {"model params": 2e12, "main grads": 4e12, "main params": 4e12 / 1024, "moments": 8e12 / 1024}
    for kind, nbytes in expected.items():
        assert found.held[kind] == pytest.approx(nbytes, rel=1e-3)
    assert found.checkpoint == pytest.approx(14e12, rel=3e-3)
    assert found.seconds["update"] == pytest.approx(30e12 / 1024 / 3e12, rel=1e-3)
    reduce, agree, gather = found.collectives
    assert reduce.sent == pytest.approx(4e12 * 1023 / 1024, rel=1e-3)
    assert (agree.count, agree.payload) == (1, 48)
    assert found.seconds[gather.purpose] == pytest.approx(2e12 * 1023 / 1024 / 1e11, rel=1e-3)


def test_forms_of_a_model_agree() -> None:
    """A module on the meta device, its shapes by name or in order, and its number of parameters give the same bytes."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64))
    shapes = {name: list(param.shape) for name, param in module.named_parameters()}
    options: dict[str, Any] = {"precision": "bf16", "ranks": 4, "sharding": "distributed"}
    found = [estimate(model, **options) for model in (module, shapes, list(shapes.values()))]
    assert found[0].held == found[1].held == found[2].held
    count = sum(param.numel() for param in module.parameters())
    assert estimate(count, precision="bf16").held["model params"] == 2 * count


def test_frozen_parameters_and_buffers_count() -> None:
    """A frozen parameter has no gradient and no state; integer buffers keep their dtype."""
    module = nn.Sequential(layer := nn.Linear(64, 32), nn.BatchNorm1d(32))
    layer.weight.requires_grad_(False)
    found = estimate(module)
    trained = 32 * 3
    assert found.held["model params"] == 2 * (trained + 64 * 32)
    assert found.held["model buffers"] == 2 * 64 + 8
    assert found.held["gradients"] == 2 * trained
    assert estimate(module, precision="as_is").held["model params"] == 4 * (trained + 64 * 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 0}, "number of parameters must be 1 or more, got 0"),
        ({"model": [[2, -1]]}, "shape of 0 must be a list of integers"),
        ({"model": {"a": 3}}, "shape of 'a' must be a list of integers"),
        ({"model": []}, "no parameter that is trained"),
        ({"model": 1.5}, "model must be a torch.nn.Module, shapes, or a number"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"precision": "as_is"}, "needs a module"),
        ({"sharding": "zero3"}, "sharding must be one of"),
        ({"ranks": 0}, "ranks must be 1 or more"),
        ({"ranks": 2, "rank": 2}, "rank must be 1 or less"),
        ({"optimizer": "shampoo"}, "optimizer must be one of"),
        ({"optimizer": "muon", "shard": "elements"}, 'shard="elements" cuts matrices'),
        ({"optimizer": "muon"}, 'optimizer="muon", but the model has no hidden matrix'),
        ({"shard": "matrices"}, "shard must be one of"),
        ({"exp_avg_dtype": torch.int16}, "exp_avg_dtype must be one of"),
        ({"exp_avg_dtype": torch.int8, "optimizer": "sgd"}, "exp_avg_dtype=torch.int8 needs .*momentum.*, not sgd"),
        ({"exp_avg_sq_dtype": torch.uint8, "optimizer": "lion"}, "exp_avg_sq_dtype=torch.uint8 needs .*, not lion"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype must be a floating point"),
        ({"memory_bandwidth": 0.0}, "memory_bandwidth must be above 0"),
        ({"link_bandwidth": -1.0}, "link_bandwidth must be above 0"),
        ({"shards": 2}, r"argument of estimate\(\) must be one of"),
    ],
)
def test_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    """Every argument that cannot be used is named, with its value and what it may be."""
    with pytest.raises((ArgumentError, TypeError), match=message):
        estimate(**({"model": 100} | arguments))


@pytest.mark.slow
def test_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model by import path, on the meta device, and shapes in a file give the same table; a picture is drawn."""
    options = ["--ranks", "4", "--sharding", "distributed", "--memory-bandwidth", "50"]
    options += ["--png", str(tmp_path / "a.png")]
    assert main(["estimate", f"{__name__}:make", *options]) == 0
    printed = capsys.readouterr().out
    assert "2,080 parameters in 2 tensors" in printed
    assert "1 all_gather" in printed
    (tmp_path / "shapes.json").write_text(json.dumps([[32, 64], [32]]))
    assert main(["estimate", str(tmp_path / "shapes.json"), *options]) == 0
    assert capsys.readouterr().out == printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch.module:make"], "'nosuch.module:make' cannot be built: ModuleNotFoundError"),
        ([f"{__name__}:json"], "cannot be built: TypeError"),
        (["os:getcwd"], "must return a torch.nn.Module, got str"),
        (["nosuch.json"], "'nosuch.json' is not a number such as 7B or 7e9, a Hugging Face config.json"),
        (["Qwen/Qwen2-7B"], "a model of the hub is not downloaded: give its config.json"),
        (["7X"], "'7X' is not a number such as 7B or 7e9"),
        (["7B", "--gpu", "h1000"], "--gpu must be one of h100, h200"),
        (["7B", "--gpu", "0"], "or its memory in GB, got '0'"),
        (["nan"], "must be a number of parameters"),
        (["100", "--optimizer", "muon"], 'optimizer="muon", but the model has no hidden matrix'),
        (["100", "--ranks", "0"], "--ranks must be 1 or more"),
        (["100", "--bucket-numel", "0"], "--bucket-numel must be 1 or more"),
        (["100", "--link-bandwidth", "fast"], "--link-bandwidth must be a number of GB a second, got 'fast'"),
        (["100", "--optimizer-offload-fraction", "0.5"], "--optimizer-offload-fraction needs"),
        (["100", "--timeline", "a.svg"], "--timeline needs --tokens"),
        (["100", "--tokens", "8"], "--tokens needs --gpu"),
        (["100", "--tokens", "0", "--gpu", "h100"], "--tokens must be 1 or more"),
        (["100", "--tokens", "8", "--gpu", "t4"], "--gpu must be one of h100"),
        (["100", "--tokens", "8", "--gpu", "h100", "--bus", "isa"], "--bus must be one of pcie4"),
        (["100", "--tokens", "8", "--gpu", "h100", "--host-bandwidth", "0"], "--host-bandwidth must be above 0"),
        (["100", "--png", "/nosuch/a.png"], "--png /nosuch/a.png cannot be written"),
    ],
)
def test_command_names_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the argument as it was typed."""
    assert main(["estimate", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_command_measures_bandwidth(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``--memory-bandwidth measure`` times this machine's memory, as ``bench`` does."""
    monkeypatch.setattr("megascale.cli.bench.PROBE_BYTES", 1 << 16)
    monkeypatch.setattr("megascale.cli.bench.PROBE_SECONDS", 0.01)
    assert main(["estimate", "1000000", "--memory-bandwidth", "measure"]) == 0
    assert "as if nothing overlapped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "numel"), [("7B", 7e9), ("70b", 7e10), ("124M", 1.24e8), ("1.5K", 1500), ("1T", 1e12)]
)
def test_numbers_of_parameters_as_models_are_called(text: str, numel: float) -> None:
    """7B is a number of parameters; it was taken for a file."""
    assert model_of(text) == numel


LLAMA_2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA_3 = LLAMA_2 | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
QWEN_2 = LLAMA_2 | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
QWEN_3 = LLAMA_2 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
CONFIGS = {
    "llama-2-7b": (LLAMA_2, 6_738_415_616),
    "llama-3.1-8b": (LLAMA_3, 8_030_261_248),
    "mistral-7b": (LLAMA_2 | {"model_type": "mistral", "intermediate_size": 14336}, 7_241_732_096),
    "qwen2.5-7b": (
        QWEN_2 | {"model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4},
        7_615_616_512,
    ),
    "qwen3-0.6b": (
        QWEN_3
        | {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
        596_049_920,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "n_inner": None},
        124_439_808,
    ),
}
"""Configs of published models, and how many parameters these have."""


@pytest.mark.parametrize(("config", "numel"), CONFIGS.values(), ids=CONFIGS)
def test_a_hugging_face_config_gives_the_published_number(config: dict[str, Any], numel: int, tmp_path: Path) -> None:
    """By the file or its folder, with the values that a config leaves out."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (tmp_path, tmp_path / "config.json"):
        assert estimate(model_of(str(given))).sizes.numel == numel


def test_hidden_matrices_of_a_config_are_muons(tmp_path: Path) -> None:
    """Names are the model's own, so that Muon takes the layers' matrices, and neither embeddings nor the head."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2))
    params = estimate(model_of(str(tmp_path))).sizes.params
    hidden = [param.name for param in params if param.is_hidden]
    assert len(hidden) == 7 * 32
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & set(hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bloom"}, "model_type must be one of gpt2, llama, mistral, qwen2, qwen3, got 'bloom'"),
        ({"hidden_size": None}, "field 'hidden_size' of the config must be an integer, 1 or more, got None"),
    ],
)
def test_a_config_that_says_too_little(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the field, or says how another model is given."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2 | change))
    assert main(["estimate", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_does_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """`--gpu` answers yes with what is left; or no, with options that fit, and these do when they are typed."""
    assert main(["estimate", "1B", "--gpu", "h100"]) == 0
    assert "Does it fit? (H100, 80 GB)\n  yes: 64.0 GB per rank are left" in capsys.readouterr().out
    assert main(["estimate", "7B", "--gpu", "80"]) == 0
    said = capsys.readouterr().out
    assert "Does it fit? (80 GB)\n  no: 32.0 GB per rank too much" in said
    options = [
        line.removeprefix("  fits with ").split(":")[0].split() for line in said.splitlines() if "fits w" in line
    ]
    assert len(options) == 3
    for typed in options:
        assert main(["estimate", "7B", "--gpu", "80", *typed]) == 0
        assert "  yes: " in capsys.readouterr().out
    assert main(["estimate", "1T", "--gpu", "t4"]) == 0
    assert "take a larger card" in capsys.readouterr().out
