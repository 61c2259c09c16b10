"""The training program, alone and on several ranks, each run in new processes.

How users start those is tested where a run is interrupted, and by test_train_launch.py. Elsewhere they are forked from
a process that has imported torch already, with the variables that torchrun would set.
"""

import csv
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import load
from megascale.train.__main__ import main
from megascale.train.build import DTYPES, build_task, build_wrapped_optimizer
from megascale.train.config import load_config
from megascale.train.run_log import COLUMNS
from tests.jobs import free_port, job, wait_until
from tests.pool import RankPool
from tests.training import same_bits, snapshot

TINY = [
    "task=text",
    "text.width=16",
    "text.layers=1",
    "text.heads=2",
    "text.context=16",
    "text.heldout_windows=8",
    "batch_size=4",
    "evaluate_every=10",
    "threads=1",
    "optimizer.name=adamw",
    "optimizer.lr=0.003",
    "optimizer.schedule=constant",
    "scaler.growth_interval=4",
    "wandb_name=run",
]


def _command(ranks: int, folder: Path, *arguments: str) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = start if ranks > 1 else [sys.executable]
    return [*program, "-m", "megascale.train", *TINY, f"output_dir={folder}", *arguments]


def _run_main(world_size: int, port: int, arguments: list[str]) -> tuple[int, str]:
    """Run the program in this process; return its exit status, and what it printed."""
    if world_size > 1:
        rank = current_process().name.split()[1]  # the pool calls it "rank 0 of 2"
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        status = main(arguments)
    return status, printed.getvalue()


Train = Callable[..., str]


@pytest.fixture
def train(ranks: RankPool) -> Train:
    """Return what runs the program on new ranks: ``train(2, folder, "steps=4", status=0)``, with what they print."""

    def run(world_size: int, folder: Path, *arguments: str, status: int = 0) -> str:
        given = [*TINY, f"output_dir={folder}", *arguments]
        with ranks.spawn(world_size, _run_main, world_size, free_port(), given, process_group=False) as fresh:
            results = fresh.results(timeout=150)
        output = "\n".join(printed for _, printed in results)
        assert [ended for ended, _ in results] == [status] * world_size, output
        return output

    return run


def _rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "run" / "metrics.csv", newline="") as stream:
        return list(csv.DictReader(stream))


def _state(folder: Path, *arguments: str) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Return model, main params and moments of a run's latest checkpoint, its scaler and its user state."""
    config = load_config([*TINY, *arguments])
    model = build_task(config).model().to(DTYPES[config.precision])
    optimizer = build_wrapped_optimizer(config, model)
    loaded = load(folder / "run" / "checkpoints", model, optimizer)
    return snapshot(optimizer, model), optimizer.state_dict()["grad_scaler"], loaded.user_state


def _without_speed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "samples_per_second"} for row in rows]


@pytest.mark.slow
def test_resume_is_bitwise_on_two_ranks(train: Train, tmp_path: Path) -> None:
    """40 steps straight equal 20, save, new processes and 20 more: params, main params, moments, scaler, data, log."""
    train(2, tmp_path / "straight", "steps=40")
    train(2, tmp_path / "halves", "steps=20")
    output = train(2, tmp_path / "halves", "steps=40")
    assert "resumed at step 20" in output
    straight, straight_scaler, straight_user = _state(tmp_path / "straight")
    halves, halves_scaler, halves_user = _state(tmp_path / "halves")
    assert same_bits(straight, halves)
    assert straight_scaler == halves_scaler
    for user in (straight_user, halves_user):
        del user["progress"]["seconds"]
    assert straight_user["progress"] == halves_user["progress"]
    assert straight_user["progress"]["step"] == 40
    rows = _rows(tmp_path / "straight")
    assert _without_speed(rows) == _without_speed(_rows(tmp_path / "halves"))
    assert [int(row["step"]) for row in rows] == list(range(40))
    assert sum(int(row["skipped"]) for row in rows) == straight_user["progress"]["skipped"] > 0
    train(1, tmp_path / "alone", "steps=1")
    [alone] = _rows(tmp_path / "alone")
    # The ranks share one global batch: the first step sees what a single process sees, up to fp16 rounding.
    for name in ("loss", "batch_accuracy", "grad_norm"):
        assert float(rows[0][name]) == pytest.approx(float(alone[name]), rel=2e-3)
    output = train(2, tmp_path / "halves", "steps=40")
    assert "resumed at step 40" in output
    assert "done: step 40 of 40" in output
    assert _without_speed(rows) == _without_speed(_rows(tmp_path / "halves"))


SHARDED = ["optimizer.sharded=true", "optimizer.overlap_param_gather=true", "optimizer.bucket_numel=2000"]


@pytest.mark.slow
def test_sharded_run_goes_on_replicated(train: Train, tmp_path: Path) -> None:
    """optimizer.sharded=true: the same skips and scales; its checkpoint goes on on one rank, not sharded, and back."""
    train(2, tmp_path, *SHARDED, "steps=12")
    assert "resumed at step 12" in train(1, tmp_path, "steps=16")
    assert "resumed at step 16" in train(2, tmp_path, *SHARDED, "steps=20")
    rows = _rows(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(20))
    train(2, tmp_path / "replicated", "steps=12")
    replicated = _rows(tmp_path / "replicated")
    first = rows[:12]
    assert [(row["skipped"], row["scale"]) for row in first] == [(row["skipped"], row["scale"]) for row in replicated]
    assert sum(int(row["skipped"]) for row in first) > 0
    for row, other in zip(first, replicated, strict=True):
        assert float(row["loss"]) == pytest.approx(float(other["loss"]), rel=1e-2)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.release), pytest.param(2, marks=pytest.mark.slow)]
)
def test_interrupt_saves_and_the_next_run_goes_on(train: Train, tmp_path: Path, world_size: int) -> None:
    """Ctrl-C (a SIGINT to everybody) saves the step and ends; the same command then finishes the run, bit for bit."""
    command = _command(world_size, tmp_path / "cut", "steps=300")
    events = tmp_path / "cut" / "run" / "tensorboard"
    with job(command) as run:
        wait_until(lambda: events.is_dir() and any(events.iterdir()), run)
        time.sleep(0.5)
        os.killpg(run.pid, signal.SIGINT)
        run.process.wait(60)
        output = run.output
        returncode = run.process.returncode
    assert "stopped by a signal; run the same command to go on" in output
    if world_size == 1:
        assert returncode == 128 + signal.SIGINT
    summary = json.loads((tmp_path / "cut" / "run" / "summary.json").read_text())
    stopped = summary["step"]
    assert 0 < stopped < 300
    assert [int(row["step"]) for row in _rows(tmp_path / "cut")] == list(range(stopped))
    assert f"resumed at step {stopped}" in train(world_size, tmp_path / "cut", "steps=300")
    train(world_size, tmp_path / "straight", "steps=300")
    assert same_bits(_state(tmp_path / "cut")[0], _state(tmp_path / "straight")[0])


@pytest.mark.parametrize(
    "precision", ["fp16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp32"))]
)
def test_alone_in_each_precision(train: Train, tmp_path: Path, precision: str) -> None:
    """A run without torchrun: the loss falls, everything is logged each step, and the parameters have the dtype asked
    for.
    """
    options = [f"precision={precision}", "steps=60", "checkpoint.async_save=true", "checkpoint.every=20"]
    train(1, tmp_path, *options)
    rows = _rows(tmp_path)
    assert tuple(rows[0]) == COLUMNS
    losses = [float(row["loss"]) for row in rows]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert math.isnan(float(rows[0]["total_accuracy"]))
    assert float(rows[-1]["total_accuracy"]) > 0.05
    assert {float(row["scale"]) for row in rows} > {65536.0}
    state, _, _ = _state(tmp_path, f"precision={precision}")
    assert {value.dtype for name, value in state.items() if name.startswith("model.")} == {DTYPES[precision]}
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == ["step_00000040", "step_00000060"]
    assert any((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.slow
def test_refusals_of_a_run(train: Train, tmp_path: Path) -> None:
    """Another configuration in the same folder, an odd batch, a bad key: exit status 2 and a message with the
    remedy.
    """
    train(1, tmp_path, "steps=2")
    output = train(1, tmp_path, "steps=4", "seed=1", status=2)
    assert "holds a run with other options: seed=0 there, 1 here. Give another wandb_name or output_dir" in output
    output = train(1, tmp_path, "steps=3", "seed=1", "checkpoint.resume=restart")
    assert "done: step 3 of 3" in output
    assert "Key 'step' not in 'TrainConfig'" in train(1, tmp_path, "step=4", status=2)
    output = train(2, tmp_path / "odd", "batch_size=5", status=2)
    assert "batch_size=5 must be a multiple of the 2 ranks" in output


@pytest.mark.slow
def test_weights_and_biases_is_optional(train: Train, tmp_path: Path) -> None:
    """Asked for and not installed: a message with the pip line. Installed: the offline run is written."""
    try:
        import wandb  # noqa: F401
    except ModuleNotFoundError:
        output = train(1, tmp_path, "steps=2", "wandb=offline", status=2)
        assert "wandb=offline needs wandb, which is not installed: pip install 'megascale[wandb]'" in output
    else:
        train(1, tmp_path, "steps=2", "wandb=offline")
        assert any((tmp_path / "run" / "wandb").glob("offline-run-*"))
