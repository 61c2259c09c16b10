"""A rank is gone in the middle of a message: gloo forgets the message, whoever waits for it does not wait for ever.

And a rank that is only slow is never held to be gone.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megascale.grad_sync import message_thread, reduction
from megascale.grad_sync.bucket import FlatBucket
from megascale.grad_sync.layout import ParamSize, build_layouts
from megascale.grad_sync.message_thread import MessageThread
from megascale.grad_sync.reduction import P2PReduceScatter, ReduceThread
from megascale.grad_sync.synced_bucket import SyncedBucket
from megascale.main_params.gather import _GATHER_BIT, GatheredBucket
from megascale.parallel import GradGroup
from megascale.utils.collectives import LostMessage, Pending, exchange_start
from tests.pool import GLOO_TIMEOUT_S, RankPool

NUMEL = 1 << 24
"""Elements of a message: 64 MB do not fit a connection's buffers."""
TAG = 7
INTERVAL_S = 0.2


@contextmanager
def _impatient() -> Iterator[None]:
    before, message_thread.PROBE_INTERVAL_S = message_thread.PROBE_INTERVAL_S, INTERVAL_S
    try:
        yield
    finally:
        message_thread.PROBE_INTERVAL_S = before


class _Victim:
    """The second rank of a pair, which is killed when a part of a message has arrived."""

    def __init__(self, pid: int, group: ProcessGroup) -> None:
        self.group = group
        self._pid = pid

    def is_killed_while(self, arriving: Tensor) -> None:
        """Kill it when the first element of ``arriving`` is no longer 0 and the last one is."""
        while arriving[0] == 0:
            pass
        os.kill(self._pid, signal.SIGSTOP)
        time.sleep(INTERVAL_S)
        assert arriving[0] != 0
        assert arriving[-1] == 0, "the message is cut"
        self.is_killed()

    def is_stopped(self) -> None:
        """Let it take no more of what is sent to it."""
        os.kill(self._pid, signal.SIGSTOP)
        time.sleep(INTERVAL_S)

    def is_killed(self) -> None:
        """Kill it, and give gloo the time to hear of it."""
        os.kill(self._pid, signal.SIGKILL)
        time.sleep(INTERVAL_S)


def _receive(victim: _Victim) -> Callable[[], None]:
    received = torch.zeros(NUMEL)
    thread = MessageThread()
    start = partial(dist.irecv, received, group=victim.group, group_src=1, tag=TAG)
    future = thread.submit(partial(thread.wait, Pending([(1, start)], [received], victim.group)))
    victim.is_killed_while(received)
    return partial(thread.result, future)


def _send(victim: _Victim) -> Callable[[], None]:
    sent = torch.ones(NUMEL)
    thread = MessageThread()
    victim.is_stopped()
    start = partial(dist.isend, sent, group=victim.group, group_dst=1, tag=TAG)
    future = thread.submit(partial(thread.wait, Pending([(1, start)], [sent], victim.group)))
    time.sleep(INTERVAL_S)
    victim.is_killed()
    return partial(thread.result, future)


def _both_ways(victim: _Victim) -> Callable[[], None]:
    """What is sent is cut, what is to be received has not begun: the connection's end is known without a question."""
    sent, received = torch.ones(2, NUMEL), torch.zeros(1, NUMEL)
    victim.is_stopped()
    exchange = exchange_start(received, sent, victim.group, TAG)
    time.sleep(INTERVAL_S)
    victim.is_killed()
    return exchange.wait


def _reduce(victim: _Victim) -> Callable[[], None]:
    thread = ReduceThread()
    flat = torch.ones(2 * NUMEL)
    group = GradGroup(holders=victim.group, shard=victim.group, replicate=None)
    arriving = thread.memory(2 * NUMEL, flat).zero_()[:NUMEL]
    reduction = P2PReduceScatter(flat, group, torch.float32, [0, NUMEL, 2 * NUMEL], thread, TAG)
    reduction.start(1)
    victim.is_killed_while(arriving)
    return reduction.wait


def _gather(victim: _Victim) -> Callable[[], None]:
    [layout] = build_layouts([ParamSize("w", 2 * NUMEL, None)], 2, bucket_numel=2 * NUMEL)
    shape = {"w": torch.Size([2 * NUMEL])}
    memory = FlatBucket(layout, layout.buckets[0], shape, torch.float32, torch.device("cpu"))
    group = GradGroup(holders=victim.group, shard=victim.group, replicate=None)
    thread = ReduceThread()
    reduction = P2PReduceScatter(memory.flat, group, torch.float32, layout.cuts(layout.buckets[0]), thread, 0)
    synced = SyncedBucket(0, memory, group, {}, reduction, 0)
    gathered = GatheredBucket(synced, torch.float32, thread)
    gathered.start()
    victim.is_killed_while(gathered.memory.shard(1))
    return gathered.wait


CASES = {"receive": _receive, "send": _send, "both ways": _both_ways, "reduce": _reduce, "gather": _gather}
"""Each begins a message of a lost rank, and returns who waits for it."""
SENDS = {"receive": TAG, "reduce": TAG, "gather": _GATHER_BIT}
"""The tag of what the victim sends. The others' victims only receive."""


def _survive() -> dict[str, tuple[str, float]]:
    """Rank 0 loses one rank of each pair; the error that it sees, and after how many seconds."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    pairs = [dist.new_group([0, 1 + index]) for index in range(len(CASES))]
    if dist.get_rank() > 0:
        case, group = list(CASES)[dist.get_rank() - 1], pairs[dist.get_rank() - 1]
        memory = torch.ones(NUMEL)
        if case in SENDS:
            dist.send(memory, group=group, group_dst=0, tag=SENDS[case])
        else:
            dist.recv(memory, group=group, group_src=0, tag=TAG)
    reduction.MESSAGE = NUMEL
    message_thread.PROBE_INTERVAL_S = INTERVAL_S
    ends = {}
    for pid, group, (name, begin) in zip(pids[1:], pairs, CASES.items(), strict=True):
        wait = begin(_Victim(pid, group))
        started = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            wait()
        ends[name] = (str(error.value), time.monotonic() - started)
    return ends


@pytest.mark.slow
def test_a_message_that_was_cut_off_ends_with_an_error(ranks: RankPool) -> None:
    """Sent or received, alone or in a reduction or a gather: long before the process group's timeout."""
    with ranks.spawn(1 + len(CASES), _survive) as fresh:
        [survivor, *victims] = fresh.outcomes(timeout=GLOO_TIMEOUT_S + 20, grace=GLOO_TIMEOUT_S + 5)
    assert survivor.value is not None, survivor.error
    assert all("died with exit code -9" in (victim.error or "") for victim in victims)
    for name, (error, seconds) in survivor.value.items():
        assert "Connection" in error, name
        assert seconds < GLOO_TIMEOUT_S / 4, name


def _wait_for_a_slow_rank() -> tuple[list[float], bool]:
    """One rank comes late: the other asks for it again and again; later messages are as they should be."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    thread, arrived, asked = MessageThread(), [], 0
    find_lost = Pending.find_lost

    def count(pending: Pending) -> LostMessage | None:
        nonlocal asked
        asked += 1
        return find_lost(pending)

    with _impatient(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "find_lost", count)
        for step in range(3):
            if step == 1 and rank == 1:
                time.sleep(5.5 * INTERVAL_S)
            received = torch.zeros(1, 4)
            exchange = exchange_start(received, torch.full((2, 4), 10.0 * step + rank), group, TAG)
            thread.result(thread.submit(partial(thread.wait, exchange)))
            arrived += received.unique().tolist()
    return arrived, asked >= 3


@pytest.mark.slow
def test_a_slow_rank_is_waited_for(ranks: RankPool) -> None:
    """Questions disturb nothing, and a healthy connection never ends a wait."""
    first, second = ranks.run(2, _wait_for_a_slow_rank)
    assert first == ([1.0, 11.0, 21.0], True)
    assert second[0] == [0.0, 10.0, 20.0]


def test_a_task_raises_where_it_is_waited_for() -> None:
    """Also a TimeoutError of its own. Later tasks run."""
    thread = MessageThread()

    def fail() -> None:
        raise TimeoutError("of the task")

    failed, after = thread.submit(fail), thread.submit(lambda: None)
    with pytest.raises(TimeoutError, match="of the task"):
        thread.result(failed)
    thread.result(after)
    thread.close()


STUCK = """
import threading
from megascale.grad_sync.message_thread import MessageThread
thread = MessageThread()
thread.submit(threading.Event().wait)
raise SystemExit(3)
"""


ENDS = """
import time
from megascale.grad_sync.message_thread import MessageThread
thread = MessageThread()
thread.submit(lambda: (time.sleep(0.3), print("done")))
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    """Status and output of both programs. They start together: that takes seconds."""
    started = {
        code: subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for code in (STUCK, ENDS)
    }
    try:
        outputs = {code: process.communicate(timeout=60)[0] for code, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    return {code: (process.returncode, outputs[code]) for code, process in started.items()}


@pytest.mark.slow
def test_a_stuck_thread_keeps_no_process_alive(ended: dict[str, tuple[int, str]]) -> None:
    """The process ends with its own status."""
    assert ended[STUCK] == (3, "")


@pytest.mark.slow
def test_a_process_ends_after_the_task_under_way(ended: dict[str, tuple[int, str]]) -> None:
    """No task is cut by the interpreter's end where it would have ended by itself."""
    assert ended[ENDS] == (0, "done\n")
