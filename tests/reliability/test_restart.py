"""A sharded run loses a rank or a node without a word. No process waits for ever, and the run goes on from its latest
checkpoint, on as many ranks or fewer.
"""

import contextlib
import csv
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import load
from megascale.train.build import DTYPES, build_grad_scaler, build_task, build_wrapped_optimizer
from megascale.train.config import load_config
from tests.jobs import Job, free_port, job, wait_until
from tests.training import same_bits, snapshot

# The scale rises and falls all the time, and a save every 10 steps finds the count of clean steps anywhere below 7.
RUN = [
    *("task=text", "text.width=16", "text.layers=1", "text.heads=2", "text.context=16", "text.heldout_windows=8"),
    *("batch_size=4", "evaluate_every=100", "threads=1", "wandb_name=run", "scaler.growth_interval=7"),
    *("optimizer.name=adamw", "optimizer.lr=0.003", "optimizer.schedule=constant", "checkpoint.every=10"),
]
SHARDED = ["optimizer.sharded=true", "optimizer.overlap_param_gather=true", "optimizer.bucket_numel=2000"]
TORCHRUN = ["-m", "torch.distributed.run"]


def _train(
    folder: Path, *arguments: str, launcher: Sequence[str] = (), variables: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[Job]:
    program = ["-m", "megascale.train", *RUN, *SHARDED, f"output_dir={folder}", *arguments]
    # A restart must not find the addresses of the ranks before it: launch/elastic.sh says more.
    return job([sys.executable, *launcher, *program], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | (variables or {}))


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("run/checkpoints/step_*")}


def _rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "run" / "metrics.csv", newline="") as stream:
        return [{k: v for k, v in row.items() if k != "samples_per_second"} for row in csv.DictReader(stream)]


def _end(folder: Path) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]]:
    """Model, main params and moments of the last checkpoint; its scaler; its progress but for the time it took."""
    config = load_config(RUN)
    model = build_task(config).model().to(DTYPES[config.precision])
    optimizer = build_wrapped_optimizer(config, model)
    progress = dict(load(folder / "run" / "checkpoints", model, optimizer).user_state["progress"])
    del progress["seconds"]
    return snapshot(optimizer, model), optimizer.state_dict()["grad_scaler"], progress


def _resumed_at(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"resumed at step (\d+)", output)]


def _check_log(folder: Path, steps: int, resumed: int) -> None:
    """Every step is there once, the scale is that of one scaler that saw them all, and the run has learned."""
    rows = _rows(folder)
    assert [row["step"] for row in rows] == [str(step) for step in range(steps)]
    scaler = build_grad_scaler(load_config(RUN).scaler)
    assert scaler is not None
    scales = []
    for row in rows:
        scales.append(scaler.scale.item())
        scaler.update(row["skipped"] == "1")
    assert [float(row["scale"]) for row in rows] == scales
    assert 0 < resumed < steps
    assert sum(int(row["skipped"]) for row in rows[:resumed]) > 0
    assert sum(int(row["skipped"]) for row in rows[resumed:]) > 0
    losses = [float(row["loss"]) for row in rows]
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    assert float(rows[-1]["total_accuracy"]) > 0.1
    progress = _end(folder)[2]
    assert progress["step"] == steps
    assert progress["skipped"] == sum(int(row["skipped"]) for row in rows)
    assert not list(folder.glob("run/checkpoints/.*")), "what the killed save had begun is removed"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "async_save"), [(0, "false"), (1, "true")])
def test_the_other_rank_ends_and_one_rank_goes_on(tmp_path: Path, victim: int, async_save: str) -> None:
    """One of two ranks is killed in mid-run: the other's process ends by itself, with an error, by the end of the
    group's timeout; its threads keep nothing alive. One rank then goes on from the shards that two have written.
    """
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    save, patience = f"checkpoint.async_save={async_save}", "distributed.timeout=30"
    with (
        _train(tmp_path, "steps=10000", save, patience, variables=place | {"RANK": "0"}) as first,
        _train(tmp_path, "steps=10000", save, patience, variables=place | {"RANK": "1"}) as second,
    ):
        both = (first, second)
        wait_until(lambda: len(_checkpoints(tmp_path)) > 1, *both)
        os.kill(both[victim].pid, signal.SIGKILL)
        last_words = both[1 - victim].finish(timeout=60, status=1)
    assert re.search(r"Connection (closed|reset)|Timed out waiting|lost contact with another rank", last_words), (
        last_words
    )
    saved = max(_checkpoints(tmp_path))
    steps = int(saved.removeprefix("step_")) + 100
    with _train(tmp_path, f"steps={steps}", save) as alone:
        [resumed] = _resumed_at(alone.finish())
    assert saved == f"step_{resumed:08d}"
    _check_log(tmp_path, steps, resumed)


TWO_RANKS = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
STEPS = 400


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    with _train(folder, f"steps={STEPS}", launcher=TWO_RANKS) as run:
        assert _resumed_at(run.finish()) == []
    return folder


@pytest.mark.release
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_leaves_no_trace(tmp_path: Path, whole: Path, victim: int) -> None:
    """A rank is killed in mid-run and torchrun starts both again: the end is that of a run that nothing happened to.

    To the bit: params, main params, moments, scaler, counts and every row of the log. Each rank had half of the state.
    """
    with _train(tmp_path, f"steps={STEPS}", launcher=TWO_RANKS) as run:
        wait_until(lambda: _checkpoints(tmp_path), run)
        os.kill(run.ranks()[victim], signal.SIGKILL)
        [resumed] = _resumed_at(run.finish())
    state, scaler, progress = _end(tmp_path)
    whole_state, whole_scaler, whole_progress = _end(whole)
    assert same_bits(state, whole_state)
    assert scaler == whole_scaler
    assert progress == whole_progress
    assert _rows(tmp_path) == _rows(whole)
    _check_log(tmp_path, STEPS, resumed)


@pytest.mark.release
def test_lost_node_leaves_fewer_ranks(tmp_path: Path) -> None:
    """One of two nodes is gone, launcher and rank: torchrun starts the other alone, and it goes on."""
    # Torchrun's own patience with a lost node is 15 s, with a late one 30 s.
    patience = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "restart"]
    size = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5"]
    launcher = (*TORCHRUN, *size, *meeting, "--rdzv-conf", patience)
    with _train(tmp_path, "steps=1500", launcher=launcher) as stays:
        time.sleep(2)  # the first to come hosts the meeting
        with _train(tmp_path, "steps=1500", launcher=launcher) as leaves:
            wait_until(leaves.ranks, stays, leaves)
            before = _checkpoints(tmp_path)
            wait_until(lambda: _checkpoints(tmp_path) - before, stays, leaves)
            for pid in (leaves.pid, *leaves.ranks().values()):
                os.kill(pid, signal.SIGKILL)
            output = stays.finish()
    _check_log(tmp_path, 1500, _resumed_at(output)[-1])
