"""Programs for tests: started as users start them, and gone at the end with everything they have started.

    with job([sys.executable, "-m", "megascale.train"]) as training:
        output = training.finish(timeout=120)             # what it printed; AssertionError on another status than 0

torchrun puts its ranks into sessions of their own. A rank that hangs would outlive torchrun and keep a pipe open, and
the test would wait for ever: output goes to a file here, and the end finds each process by a mark in its environment.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MARK = "MEGASCALE_TEST_JOB"
ROOT = Path(__file__).parents[1]


class Job:
    """A running program. `output` is what it and its children have printed so far."""

    def __init__(self, command: Sequence[str], variables: dict[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | (variables or {}) | {MARK: self._mark}
        self.process = subprocess.Popen(
            list(command), stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )

    @property
    def pid(self) -> int:
        """Process id of the program itself."""
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    @property
    def output(self) -> str:
        """Both streams, as text."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def finish(self, timeout: float = 120, status: int = 0) -> str:
        """Wait for its end, check its status, return its output.

        Raises:
            AssertionError: it ran longer than `timeout` seconds, or ended with another status; shows the output.
        """
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None
        assert self.process.returncode == status, f"status {self.process.returncode}, not {status}:\n{self.output}"
        return self.output

    def children(self) -> dict[int, dict[str, str]]:
        """Process id to environment of everything it has started, at any depth, that still runs."""
        found = _marked(self._mark)
        found.pop(self.pid, None)
        return found

    def ranks(self) -> dict[int, int]:
        """Rank to process id below torchrun."""
        started = self.children().items()
        return {int(variables["RANK"]): pid for pid, variables in started if "RANK" in variables}

    def close(self) -> None:
        """Kill what still runs of it."""
        while left := _marked(self._mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait()
        self._log.close()


@contextlib.contextmanager
def job(command: Sequence[str], variables: dict[str, str] | None = None) -> Iterator[Job]:
    """Start `command`, with `variables` added to its environment; at the end nothing of it is left."""
    started = Job(command, variables)
    try:
        yield started
    finally:
        started.close()


def printed_by(script: str | Path, *arguments: str, ranks: int = 2) -> str:
    """Return what a script of examples/ prints under torchrun; with 0 ranks, without it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with job([sys.executable, *torchrun, str(ROOT / "examples" / script), *arguments], variables) as running:
        return running.finish(timeout=240)


def wait_until(condition: Callable[[], object], *running: Job, timeout: float = 90) -> None:
    """Wait for the condition; AssertionError when one of the jobs ends first, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        shown = "\n".join(each.output for each in running)
        assert time.monotonic() < deadline, shown
        assert all(each.status is None for each in running), shown
        time.sleep(0.02)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _marked(mark: str) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (folder / "environ").read_bytes().decode(errors="replace")
            variables = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
            if variables.get(MARK) == mark:
                found[int(folder.name)] = variables
    return found
