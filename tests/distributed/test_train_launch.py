"""The scripts in launch/: they start the program on real processes, and pass arguments on unharmed."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, free_port, job, wait_until

LAUNCH = Path(__file__).parents[2] / "launch"
TINY = ["task=text", "text.width=16", "text.layers=1", "text.heads=2", "text.context=16", "text.heldout_windows=8"]
TINY += ["batch_size=4", "threads=1", "optimizer.name=adamw", "optimizer.lr=0.003", "wandb_name=run"]


def _launch(script: str, *arguments: str, **variables: str) -> contextlib.AbstractContextManager[Job]:
    return job([str(LAUNCH / script), *arguments], {"PYTHON": sys.executable} | variables)


def _output(script: str, *arguments: str, status: int = 0, **variables: str) -> str:
    with _launch(script, *arguments, **variables) as run:
        return run.finish(status=status)


def _ranks_of(folder: Path) -> int:
    return int(json.loads((folder / "run" / "summary.json").read_text())["ranks"])


@pytest.mark.slow
def test_one_node(tmp_path: Path) -> None:
    """Two ranks on this machine; the script prints its command and ends with the program's status."""
    output = _output("one_node.sh", "2", *TINY, "steps=3", f"output_dir={tmp_path}")
    assert output.startswith(f"+ {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2")
    assert "done: step 3 of 3" in output
    assert _ranks_of(tmp_path) == 2
    _output("one_node.sh", "1", "step=3", status=1)


@pytest.mark.release
def test_several_nodes_meet(tmp_path: Path) -> None:
    """Two launchers, as on two machines, find one another and train as one job."""
    arguments = ["2", "1", f"localhost:{free_port()}", *TINY, "steps=3", f"output_dir={tmp_path}"]
    with _launch("multi_node.sh", *arguments) as one, _launch("multi_node.sh", *arguments) as other:
        outputs = [one.finish(), other.finish()]
    assert sum("done: step 3 of 3" in output for output in outputs) == 1
    assert _ranks_of(tmp_path) == 2


def test_options_of_several_nodes(tmp_path: Path) -> None:
    """Options with two dashes go to torchrun, other arguments to the program; INTERFACE to gloo and NCCL."""
    arguments = ["2", "4", "node1:29400", "--max-restarts=3", "steps=3", "--rdzv-conf=is_host=1", "wandb_name=a b"]
    assert _output("multi_node.sh", *arguments, DRY_RUN="1", INTERFACE="eth1") == (
        f"+ env GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1 {sys.executable} -m torch.distributed.run --nnodes 2 "
        "--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node1:29400 --rdzv-id megascale --max-restarts=3 "
        "--rdzv-conf=is_host=1 -m megascale.train steps=3 wandb_name=a\\ b\n"
    )


@pytest.mark.release
def test_elastic_goes_on_when_a_node_is_lost(tmp_path: Path) -> None:
    """One of two nodes dies without a word: the other starts again from the latest checkpoint and finishes alone."""
    arguments = [
        "1:2",
        "1",
        f"localhost:{free_port()}",
        *TINY,
        "steps=1500",
        "checkpoint.every=20",
        f"output_dir={tmp_path}",
    ]
    with _launch("elastic.sh", *arguments) as stays:
        time.sleep(2)  # the first to come hosts the meeting
        with _launch("elastic.sh", *arguments) as leaves:
            wait_until(lambda: list(tmp_path.glob("run/checkpoints/step_*")), stays, leaves)
            [worker] = leaves.ranks().values()
            for pid in (leaves.pid, worker):
                os.kill(pid, signal.SIGKILL)
            output = stays.finish()
    assert "resumed at step" in output
    assert "done: step 1500 of 1500" in output
    assert _ranks_of(tmp_path) == 1


def test_slurm_command(tmp_path: Path) -> None:
    """What would run under Slurm, from the variables that Slurm sets; it is not run here."""
    variables: dict[str, Any] = {
        "SLURM_JOB_ID": "70077",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_ON_NODE": "8",
        "MASTER": "node17",
        "DRY_RUN": "1",
    }
    assert _output("slurm.sh", "steps=3", "wandb_name=a b", **variables) == (
        f"+ srun --kill-on-bad-exit=1 {sys.executable} -m torch.distributed.run --nnodes 4 --nproc-per-node 8 "
        "--rdzv-backend c10d --rdzv-endpoint node17:30077 --rdzv-id 70077 -m megascale.train steps=3 wandb_name=a\\ b\n"
    )


REFUSED = [
    ("one_node.sh", [], "usage: launch/one_node.sh RANKS"),
    ("multi_node.sh", ["2", "1"], "usage: launch/multi_node.sh NODES RANKS_PER_NODE HOST:PORT"),
    ("elastic.sh", ["1:2"], "usage: launch/elastic.sh MIN:MAX RANKS_PER_NODE HOST:PORT"),
    ("slurm.sh", [], "start this script with sbatch"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), REFUSED)
def test_missing_arguments_are_named(script: str, arguments: list[str], message: str) -> None:
    """A script without what it needs says how to call it."""
    assert message in _output(script, *arguments, status=1)
