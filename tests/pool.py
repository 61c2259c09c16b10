"""Ranks for tests: gloo processes that stay up for the whole pytest session.

    def _sum_of_ranks(start: float) -> torch.Tensor:      # module level: it travels by name
        total = torch.tensor(start + dist.get_rank())
        dist.all_reduce(total)
        return total

    def test_sum(ranks: RankPool) -> None:                # the fixture `ranks` is in conftest.py
        assert [t.item() for t in ranks.run(2, _sum_of_ranks, 1.0)] == [3.0, 3.0]

`ranks.run(world_size, function, *args, timeout=60)` calls `function(*args)` on every rank, with torch.distributed up on
gloo (a world of just that many ranks, one torch thread, seeds 0) and returns the results in rank order. Arguments and
results are pickled: tensors travel by value. A rank that raises, dies or hangs makes `run` raise `RankFailure`, which
shows every rank's traceback or the place where it waits; those processes are then replaced before the next call. A
test that expects an error catches it inside the function (`with pytest.raises(...)` there) and returns its message.

Ranks are forked from a process that has imported tests/warm.py, so they start at once. Their environment is that of the
first call of a session.

The ranks of one world size are the same processes from test to test. A function leaves no state behind: no changed
environment, no destroyed default group.

`with ranks.spawn(world_size, function, *args) as fresh:` runs the function in new processes, for a test that kills
some: `fresh.kill(rank)`, `fresh.pids`, `fresh.outcomes(timeout)` (never raises) and `fresh.results(timeout)` (raises
RankFailure). With `process_group=False` the function finds torch.distributed not initialised.
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
GLOO_TIMEOUT_S = 40.0
GRACE_S = 2.0  # how long the other ranks may still report after the first failure
LOG_TAIL_CHARS = 4000


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of one rank's call: a value, or `error` (a traceback, or how and where it ended)."""

    rank: int
    value: T | None
    error: str | None


class RankFailure(Exception):
    """A call failed on at least one rank. `errors` holds each failed rank's traceback or end."""

    def __init__(self, function: Callable[..., Any], outcomes: list[Outcome[Any]]) -> None:
        self.errors = {outcome.rank: outcome.error for outcome in outcomes if outcome.error is not None}
        name = f"{function.__module__}.{function.__qualname__}"
        parts = [f"{name} failed on rank {', '.join(map(str, self.errors))} of {len(outcomes)}"]
        parts += [f"--- rank {rank}\n{error}" for rank, error in self.errors.items()]
        super().__init__("\n".join(parts))


class RankSet:
    """The processes of one world. One call at a time; after a failure it is only good for `close`."""

    def __init__(self, world_size: int, *, backend: str | None = "gloo", context: ForkContext | None = None) -> None:
        """Start them. ``backend``: of torch.distributed; None: it is not up. ``context``: how processes start."""
        self.world_size = world_size
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        starting = start_context() if context is None else context
        for rank in range(world_size):
            ours, theirs = starting.Pipe()
            arguments = (theirs, rank, world_size, str(self._folder), backend)
            process = starting.Process(target=_serve, args=arguments, name=f"rank {rank} of {world_size}")
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid or -1 for process in self._processes]

    @property
    def alive(self) -> bool:
        """Whether every rank's process is running."""
        return all(process.is_alive() for process in self._processes)

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Start `function(*args)` on every rank."""
        call = pickle.dumps((function, args))
        for connection in self._connections:
            # A dead rank shows in `collect`.
            with contextlib.suppress(OSError):
                connection.send_bytes(call)

    def collect(self, timeout: float, grace: float = GRACE_S) -> list[Outcome[Any]]:
        """Wait for every rank. After the first failure the others get `grace` more seconds, then they are described."""
        outcomes: dict[int, Outcome[Any]] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.world_size:
            waiting = {self._connections[r]: r for r in range(self.world_size) if r not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in range(self.world_size):
            if rank not in outcomes:
                outcomes[rank] = Outcome(rank, None, f"did not return; it was here:\n{self._where(rank)}")
        return [outcomes[rank] for rank in range(self.world_size)]

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send one rank a signal."""
        os.kill(self.pids[rank], signal_number)

    def close(self) -> None:
        """End every rank: asked first, then killed."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill_all()

    def kill_all(self) -> None:
        """End every rank at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self, rank: int) -> Outcome[Any]:
        try:
            value, error = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(GRACE_S)
            end = f"died with exit code {process.exitcode} (a negative number is the signal)"
            return Outcome(rank, None, f"{end}\n{self._log_tail(rank)}".rstrip())
        return Outcome(rank, value, error if error is None else f"{error}\n{self._log_tail(rank)}".rstrip())

    def _where(self, rank: int) -> str:
        """The Python stacks of a rank that does not answer."""
        if not (self._folder / f"rank{rank}.log").exists():
            return "(still starting)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGUSR1)
            time.sleep(0.2)
        return self._log_tail(rank)

    def _log_tail(self, rank: int) -> str:
        try:
            return (self._folder / f"rank{rank}.log").read_text(errors="replace")[-LOG_TAIL_CHARS:]
        except OSError:
            return ""


class FreshRanks:
    """Processes of their own for one call, ended when the `with` block ends."""

    def __init__(self, rank_set: RankSet, function: Callable[..., Any]) -> None:
        self._set = rank_set
        self._function = function

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return self._set.pids

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send one rank a signal, SIGKILL by default."""
        self._set.kill(rank, signal_number)

    def outcomes(self, timeout: float = CALL_TIMEOUT_S, grace: float = GRACE_S) -> list[Outcome[Any]]:
        """Each rank's value or end, in rank order; others may report until `grace` seconds after a failure."""
        return self._set.collect(timeout, grace)

    def results(self, timeout: float = CALL_TIMEOUT_S) -> list[Any]:
        """Each rank's value; raises RankFailure if one has none."""
        return values_of(self._function, self.outcomes(timeout))

    def __enter__(self) -> "FreshRanks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set.kill_all()


class RankPool:
    """The ranks of every world size asked for, started at first use. See the module's docstring."""

    def __init__(self) -> None:
        self._sets: dict[int, RankSet] = {}
        # multiprocessing joins its children at exit: they must have been told to end.
        atexit.register(self.close)

    def run(
        self, world_size: int, function: Callable[..., T], /, *args: Any, timeout: float = CALL_TIMEOUT_S
    ) -> list[T]:
        """Call `function(*args)` on every rank of a world of `world_size`; the results in rank order.

        Raises:
            RankFailure: a rank raised, died, or did not return within `timeout` seconds.
        """
        rank_set = self._ready_set(world_size)
        try:
            rank_set.submit(function, *args)
            return values_of(function, rank_set.collect(timeout))
        except BaseException:
            # Also for a failed test's KeyboardInterrupt: the ranks may still be inside the call.
            del self._sets[world_size]
            rank_set.kill_all()
            raise

    def spawn(
        self, world_size: int, function: Callable[..., Any], /, *args: Any, process_group: bool = True
    ) -> FreshRanks:
        """Start `function(*args)` on new processes; use as a context manager."""
        rank_set = RankSet(world_size, backend="gloo" if process_group else None)
        try:
            rank_set.submit(function, *args)
        except BaseException:
            rank_set.kill_all()
            raise
        return FreshRanks(rank_set, function)

    def pids(self, world_size: int) -> list[int]:
        """Process ids of the ranks of that world size, in rank order (starts them if need be)."""
        return self._ready_set(world_size).pids

    def close(self) -> None:
        """End every rank."""
        for rank_set in self._sets.values():
            rank_set.close()
        self._sets.clear()

    def _ready_set(self, world_size: int) -> RankSet:
        known = self._sets.get(world_size)
        if known is not None and known.alive:
            return known
        if known is not None:
            known.kill_all()
        self._sets[world_size] = RankSet(world_size)
        return self._sets[world_size]


def start_context() -> ForkServerContext | SpawnContext:
    """How processes start: forked from a warm process; new ones where a device could be in use before the fork."""
    if torch.accelerator.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    return context


def values_of(function: Callable[..., Any], outcomes: list[Outcome[Any]]) -> list[Any]:
    """Return each rank's value. Raises RankFailure if one has none."""
    if any(outcome.error is not None for outcome in outcomes):
        raise RankFailure(function, outcomes)
    return [outcome.value for outcome in outcomes]


def _serve(connection: Connection, rank: int, world_size: int, folder: str, backend: str | None) -> None:
    """A rank's main loop: receive a call, answer it, until the parent closes the pipe."""
    # Own session: Ctrl-C reaches pytest only, which then ends the ranks.
    os.setsid()
    # The log file lives as long as the process: faulthandler keeps its descriptor.
    log = open(Path(folder) / f"rank{rank}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), sys.stdout.fileno())
    os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    torch.set_num_threads(1)
    if backend is not None:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GLOO_TIMEOUT_S),
        )
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            # Not an orderly interpreter exit: threads of a half-finished test must not keep the process.
            os._exit(0)
        # Anew for each call: libraries under test (Lightning's Trainer for one) take the signal for themselves.
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        connection.send_bytes(_answer(call))


def _read(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and its arguments.

    What their modules are made of is there to stay, and left out of each walk through all objects: see tests/warm.py.
    """
    known = len(sys.modules)
    read = pickle.loads(call)
    if len(sys.modules) > known:
        gc.collect()
        gc.freeze()
    return read


def _answer(call: bytes) -> bytes:
    try:
        random.seed(0)
        torch.manual_seed(0)
        function, args = _read(call)
        return pickle.dumps((function(*args), None))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))
