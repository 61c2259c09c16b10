"""A checkpoint as one file: whatever wrote it, `torch.load(weights_only=True)` and a plain load_state_dict take it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megascale import DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer, consolidate
from megascale.checkpoint.__main__ import main
from megascale.checkpoint.manifest import Manifest
from megascale.errors import ArgumentError, ArgumentTypeError, CheckpointError
from tests.checkpoint_cases import build, differences, state_of, train
from tests.pool import RankPool


def _saved(directory: Path, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    model, optimizer = build(0, dtype)
    train(model, optimizer, 0, 3)
    Checkpointer(directory).save(3, model, optimizer)
    return state_of(model, optimizer)


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_weights_from_main_params(tmp_path: Path) -> None:
    """In fp32 they are the main params; in bf16, the main params rounded once; integer buffers stay."""
    state = _saved(tmp_path / "run")
    mains = state["optimizer"]["main_params"]
    for dtype in (torch.float32, torch.bfloat16):
        found = _read(consolidate(tmp_path / "run", tmp_path / f"{dtype}.pt", dtype=dtype))
        assert list(found) == list(state["model"])
        for name, weight in state["model"].items():
            wanted = mains.get(name, weight)
            assert differences(wanted.to(dtype) if wanted.is_floating_point() else wanted, found[name]) == []
    assert any(not torch.equal(mains[name], state["model"][name].float()) for name in mains)


def test_main_params_that_are_remainders(tmp_path: Path) -> None:
    """The checkpoint holds 2 bytes of them; the file their fp32 values, as weights and in the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Linear(30, 40).bfloat16()
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(bf16=True, store_param_remainders=True))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 30).bfloat16()).float().square().mean().backward()
        optimizer.step()
    path = Checkpointer(tmp_path / "run").save(3, model, optimizer)
    saved = Manifest.read(path).metadata.state_dict_metadata["optimizer/main_params/weight"]
    assert isinstance(saved, TensorStorageMetadata)
    assert saved.properties.dtype == torch.int16
    mains = optimizer.state_dict()["main_params"]
    assert not torch.equal(mains["weight"], model.weight.float())
    weights = _read(consolidate(tmp_path / "run", tmp_path / "weights.pt", dtype=torch.float32))
    whole = _read(consolidate(tmp_path / "run", tmp_path / "all.pt", optimizer=True))
    assert differences(dict(mains), weights) == []
    assert differences(dict(mains), whole["optimizer"]["main_params"]) == []
    assert differences(model.state_dict(), whole["model"]) == []


@pytest.mark.parametrize("hooked", [False, True])
def test_remainders_without_their_weights_are_refused(tmp_path: Path, hooked: bool) -> None:
    """A part of the model, or one whose state_dict() holds other tensors: said by the save, which leaves nothing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(bf16=True, store_param_remainders=True))
    if hooked:
        model.register_state_dict_post_hook(lambda _, state, *__: state.update({"1.bias": state["1.bias"].float()}))
    with pytest.raises(
        CheckpointError, match=r"main params of '.*' are held as remainders of weights that the model's"
    ):
        Checkpointer(tmp_path).save(1, model if hooked else model[0], optimizer)
    assert list(tmp_path.iterdir()) == []
    wide = MixedPrecisionOptimizer(torch.optim.AdamW(model.named_parameters()), OptimizerConfig(bf16=True))
    Checkpointer(tmp_path).save(1, model[0], wide)


def test_optimizer_state(tmp_path: Path) -> None:
    """The whole training state, which a new optimizer goes on from as the old one does."""
    state = _saved(tmp_path / "run")
    found = _read(consolidate(tmp_path / "run", tmp_path / "all.pt", optimizer=True))
    assert found.pop("step") == 3
    assert differences(state, found) == []
    model, optimizer = build(1)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    twin, twin_optimizer = build(0)
    train(twin, twin_optimizer, 0, 5)
    train(model, optimizer, 3, 5)
    assert differences(state_of(twin, twin_optimizer), state_of(model, optimizer)) == []


class Tied(nn.Module):
    """Two names for one weight, as an embedding and the output layer have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 5, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [..., 5]."""
        return self.embed(x) * self.head(x)


@pytest.mark.parametrize("named", [True, False], ids=["by name", "by position"])
def test_tied_weights_and_other_names(tmp_path: Path, named: bool) -> None:
    """Both names of a tied weight get the main param, also where the optimizer knows it as "0"."""
    torch.manual_seed(0)
    model = Tied().half()
    inner = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.01)
    optimizer = MixedPrecisionOptimizer(inner, grad_scaler=DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 2, 1))
    train(model, optimizer, 0, 2)
    Checkpointer(tmp_path / "run").save(2, model, optimizer)
    found = _read(consolidate(tmp_path / "run", tmp_path / "model.pt", dtype=torch.float32))
    [(_, weight)] = optimizer.main_params()
    assert differences({"embed.weight": weight, "head.weight": weight}, found) == []


def _save_sharded(directory: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 37), nn.Linear(37, 2)).half()
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(model.named_parameters(), lr=0.01),
        grad_scaler=DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 2, 1),
        modules=model,
        bucket_numel=100,
    )
    train(model, optimizer, 0, 3, dist.get_rank())
    Checkpointer(directory).save(3, model, optimizer)
    return state_of(model, optimizer)


def test_shards_of_three_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """One process, without torch.distributed, puts the pieces together."""
    state = ranks.run(3, _save_sharded, tmp_path / "run")[0]
    assert not dist.is_initialized()
    found = _read(consolidate(tmp_path / "run", tmp_path / "all.pt", optimizer=True))
    assert differences(state, {"model": found["model"], "optimizer": found["optimizer"]}) == []
    weights = _read(consolidate(tmp_path / "run", tmp_path / "fp32.pt", dtype=torch.float32))
    assert differences(state["optimizer"]["main_params"], weights) == []


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"path": "nowhere"}, CheckpointError, r"no checkpoint at .*nowhere: the folder does not exist"),
    ({"step": 4}, CheckpointError, r"no checkpoint of step 4 in .*; there are steps 3"),
    ({"step": -1}, ArgumentError, r"step must be 0 or more, got -1"),
    ({"dtype": "fp32"}, ArgumentTypeError, r"dtype must be a floating point torch.dtype or None, got 'fp32'"),
    ({"dtype": torch.int8}, ArgumentTypeError, r"dtype must be a floating point torch.dtype or None, got torch.int8"),
    ({"optimizer": 1}, ArgumentTypeError, r"optimizer must be True or False, got 1"),
    ({"overwrite": "yes"}, ArgumentTypeError, r"overwrite must be True or False, got 'yes'"),
    ({"out": "missing/model.pt"}, CheckpointError, r"cannot consolidate .*missing"),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_refused_arguments(tmp_path: Path, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    """By name, before a file is there."""
    _saved(tmp_path / "run")
    given = {"path": "run", "out": "model.pt"} | change
    path, out = tmp_path / given.pop("path"), tmp_path / given.pop("out")
    with pytest.raises(kind, match=message):
        consolidate(path, out, **given)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_existing_file_is_kept_unless_told(tmp_path: Path) -> None:
    """A file is replaced as a whole, and only with overwrite=True."""
    state = _saved(tmp_path / "run")
    out = tmp_path / "model.pt"
    out.write_bytes(b"precious")
    with pytest.raises(CheckpointError, match=r"model.pt exists already; choose another file, or pass overwrite=True"):
        consolidate(tmp_path / "run", out)
    assert out.read_bytes() == b"precious"
    assert consolidate(tmp_path / "run", out, overwrite=True) == out
    assert differences(state["model"], _read(out)) == []


def _no_optimizer(directory: Path) -> None:
    Checkpointer(directory).save(3, build(0)[0])


def _damaged(directory: Path) -> None:
    _saved(directory)
    data = directory / "step_00000003" / "rank_00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (_no_optimizer, r"the checkpoint of step 3 holds no optimizer state; it has model"),
        (_damaged, r"rank_00000.safetensors is damaged: its checksum does not fit"),
    ],
)
def test_checkpoint_that_will_not_do(tmp_path: Path, prepare: Callable[[Path], object], message: str) -> None:
    """It is found before anything is written."""
    prepare(tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        consolidate(tmp_path / "run", tmp_path / "all.pt", optimizer=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m megascale.checkpoint` writes the same file, lists tensors, and reports errors by its exit status."""
    state = _saved(tmp_path / "run")
    run, out = str(tmp_path / "run"), tmp_path / "model.pt"
    command = [sys.executable, "-m", "megascale.checkpoint", run, str(out), "--dtype", "fp32", "--step", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(out)
    assert differences(_read(out)["0.weight"], state["optimizer"]["main_params"]["0.weight"]) == []
    assert main([run, str(out), "--overwrite", "--optimizer"]) == 0
    assert _read(out)["step"] == 3
    assert main([run, str(out)]) == 1
    assert "error: " in capsys.readouterr().err
    assert main([run, "--step", "3"]) == 0
    listed = capsys.readouterr().out
    assert "step 3, saved by 1 ranks" in listed
    assert "optimizer/main_params/0.weight  float32[6, 4]" in listed


def _listed(output: str) -> dict[str, tuple[str, str]]:
    """Ranks and state of every line below the heading."""
    rows = [line.split(maxsplit=4) for line in output.splitlines()[1:]]
    return {row[0]: (row[3], row[4]) for row in rows}


def test_listing_of_all_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step with its size, whether it is whole, which is the latest, and what a killed save has left."""
    model, optimizer = build(0)
    for step in (2, 3, 10):
        Checkpointer(tmp_path).save(step, model, optimizer)
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0].split() == ["step", "size", "ranks", "state"]
    assert _listed(output) == dict.fromkeys("23", ("1", "complete")) | {"10": ("1", "complete, latest")}
    data = tmp_path / "step_00000003" / "rank_00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    (tmp_path / "step_00000002" / "megascale.json").write_text("{")
    (tmp_path / ".step_00000012.incomplete-ab12").mkdir()
    assert main([str(tmp_path)]) == 1
    listed = _listed(capsys.readouterr().out)
    assert listed["3"][1].startswith("damaged: ")
    assert listed["2"][0] == "-"
    assert listed["10"] == ("1", "complete, latest")
    assert listed[".step_00000012.incomplete-ab12"][1] == "incomplete: still being written, or its writer died"
    assert main([str(tmp_path), "--quick"]) == 1
    assert _listed(capsys.readouterr().out)["3"] == ("1", "complete")
