"""The scripts in launch/: they start the program on real processes, and pass arguments on unharmed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
TINY = ["task=text", "text.width=16", "text.layers=1", "text.heads=2", "text.context=16", "text.heldout_windows=8"]
TINY += ["batch_size=4", "threads=1", "optimizer.name=adamw", "optimizer.lr=0.003", "wandb_name=run"]


def _start(script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHON": sys.executable} | variables
    return subprocess.Popen(
        [str(LAUNCH / script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _output(process: subprocess.Popen[str], status: int = 0) -> str:
    try:
        output = process.communicate(timeout=120)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, output
    return output


def _free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def _ranks_of(folder: Path) -> int:
    return int(json.loads((folder / "run" / "summary.json").read_text())["ranks"])


def test_one_node(tmp_path: Path) -> None:
    """Two ranks on this machine; the script prints its command and ends with the program's status."""
    output = _output(_start("one_node.sh", "2", *TINY, "steps=3", f"output_dir={tmp_path}"))
    assert output.startswith(f"+ {sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2")
    assert "done: step 3 of 3" in output
    assert _ranks_of(tmp_path) == 2
    _output(_start("one_node.sh", "1", "step=3"), status=1)


def test_several_nodes_meet(tmp_path: Path) -> None:
    """Two launchers, as on two machines, find one another and train as one job."""
    arguments = ["2", "1", _free_endpoint(), *TINY, "steps=3", f"output_dir={tmp_path}"]
    both = [_start("multi_node.sh", *arguments) for _ in range(2)]
    outputs = [_output(process) for process in both]
    assert sum("done: step 3 of 3" in output for output in outputs) == 1
    assert _ranks_of(tmp_path) == 2


@pytest.mark.slow
def test_elastic_goes_on_when_a_node_is_lost(tmp_path: Path) -> None:
    """One of two nodes dies without a word: the other starts again from the latest checkpoint and finishes alone."""
    arguments = ["1:2", "1", _free_endpoint(), *TINY, "steps=1500", "checkpoint.every=20", f"output_dir={tmp_path}"]
    stays = _start("elastic.sh", *arguments)
    time.sleep(2)  # the first to come hosts the meeting
    leaves = _start("elastic.sh", *arguments)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("run/checkpoints/step_*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = subprocess.run(["pgrep", "-P", str(leaves.pid)], capture_output=True, text=True).stdout.split()
        assert len(workers) == 1
        for pid in (leaves.pid, int(workers[0])):
            os.kill(pid, signal.SIGKILL)
        output = _output(stays)
    finally:
        for process in (stays, leaves):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        leaves.communicate()
    assert "resumed at step" in output
    assert "done: step 1500 of 1500" in output
    assert _ranks_of(tmp_path) == 1


def test_slurm_command(tmp_path: Path) -> None:
    """What would run under Slurm, from the variables that Slurm sets; it is not run here."""
    variables = {
        "SLURM_JOB_ID": "70077",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_ON_NODE": "8",
        "MASTER": "node17",
        "DRY_RUN": "1",
    }
    assert _output(_start("slurm.sh", "steps=3", "wandb_name=a b", **variables)) == (
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
    assert message in _output(_start(script, *arguments), status=1)
