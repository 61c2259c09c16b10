"""The loop in one process: how it stops and goes on."""

import csv
import json
import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import latest
from megascale.train.config import load_config
from megascale.train.runtime import Runtime
from megascale.train.tasks import Batch
from megascale.train.trainer import Trainer
from tests.counting import OperatorCounter

TINY = [
    "task=text",
    "text.width=16",
    "text.layers=1",
    "text.heads=2",
    "text.context=16",
    "text.heldout_windows=4",
    "batch_size=2",
    "steps=4",
    "threads=1",
    "wandb_name=run",
]


@pytest.mark.default("3")
@pytest.mark.parametrize("every", [1, 2, 3])
def test_stop_at_a_checkpoint_saves_once(tmp_path: Path, every: int) -> None:
    """A stop that is noticed at a step that is saved anyway ends cleanly, and the same run then finishes."""
    config = load_config([*TINY, f"output_dir={tmp_path}", f"checkpoint.every={every}"])
    with Runtime(threads=1) as runtime:
        runtime.stop_signal = signal.SIGINT
        assert Trainer(config, runtime).run() == 128 + signal.SIGINT
    stopped = latest(tmp_path / "run" / "checkpoints")
    assert stopped is not None
    assert stopped.name == ("step_00000001" if every == 1 else "step_00000002")
    with Runtime(threads=1) as runtime:
        assert Trainer(config, runtime).run() == 0
    finished = latest(tmp_path / "run" / "checkpoints")
    assert finished is not None
    assert finished.name == "step_00000004"


def _rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "run" / "metrics.csv", newline="") as stream:
        return [{k: v for k, v in row.items() if k != "samples_per_second"} for row in csv.DictReader(stream)]


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return {key: summary[key] for key in ("step", "total_accuracy", "skipped", "scale", "zero_grad_fraction")}


def _run(folder: Path, *arguments: str, stop_at: int | None = None) -> int:
    """Train; ``stop_at``: a SIGTERM comes while this step is taken."""
    with Runtime(threads=1) as runtime:
        trainer = Trainer(load_config([*TINY, f"output_dir={folder}", *arguments]), runtime)
        batch = trainer._batch

        def batch_or_stop(step: int) -> Batch:
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return batch(step)

        trainer._batch = batch_or_stop  # type: ignore[method-assign]
        return trainer.run()


@pytest.mark.default("4-100")
@pytest.mark.parametrize(("stop_at", "evaluate_every"), list(product(range(6), [3, 100])))
def test_stopped_at_any_step_ends_as_if_it_had_not_been(tmp_path: Path, stop_at: int, evaluate_every: int) -> None:
    """A SIGTERM at any step, also the last: after the next run summary and log are those of a run without it.

    Stopped after the last step and before the last evaluation, it ended with accuracy nan, or that of an older one.
    """
    arguments = ("steps=6", f"evaluate_every={evaluate_every}", "scaler.scale=4294967296", "optimizer.warmup_steps=3")
    assert _run(tmp_path / "straight", *arguments) == 0
    status = _run(tmp_path / "cut", *arguments, stop_at=stop_at)
    assert status == (128 + signal.SIGTERM if stop_at < 4 else 0)
    assert _run(tmp_path / "cut", *arguments) == 0
    assert _summary(tmp_path / "cut") == _summary(tmp_path / "straight")
    assert _rows(tmp_path / "cut") == _rows(tmp_path / "straight")
    assert _rows(tmp_path / "cut")[-1]["total_accuracy"] == str(_summary(tmp_path / "straight")["total_accuracy"])


def test_a_training_step_reads_nothing_on_the_host(tmp_path: Path) -> None:
    """Neither the schedule nor the log waits for the device: no host read from the second step on."""
    with Runtime(threads=1) as runtime:
        trainer = Trainer(load_config([*TINY, f"output_dir={tmp_path}", "scaler.scale=4294967296"]), runtime)
        trainer.start()
        trainer._step(0)
        with OperatorCounter() as counter:
            for step in range(1, 4):
                trainer._step(step)
        assert counter.host_reads == 0


def test_skipped_steps_name_their_gradients(tmp_path: Path) -> None:
    """overflows.jsonl has rows for each skipped step of metrics.csv, and for no other, also after a stop."""
    assert _run(tmp_path, "scaler.scale=1e30", "checkpoint.every=2", stop_at=1) == 128 + signal.SIGTERM
    with open(tmp_path / "run" / "overflows.jsonl", "a") as stream:
        stream.write('{"step": 3, "scale": 1.0}\n{"st')  # as a process that was killed leaves it
    assert _run(tmp_path, "scaler.scale=1e30", "checkpoint.every=2") == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "overflows.jsonl").read_text().splitlines()]
    named = {(row["step"], row["scale"]) for row in rows}
    assert named == {(int(row["step"]), float(row["scale"])) for row in _rows(tmp_path) if row["skipped"] == "1"}
    assert {row["step"] for row in rows} == {0, 1, 2, 3}
    assert sum(row["origin"] for row in rows) == 4
