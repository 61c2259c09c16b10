"""The loop in one process: how it stops and goes on."""

import signal
from pathlib import Path

import pytest

from megascale.checkpoint import latest
from megascale.train.config import load_config
from megascale.train.runtime import Runtime
from megascale.train.trainer import Trainer

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
