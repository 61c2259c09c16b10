"""MessageThread: its tasks run in order, and it ends when it is closed, freed, or the process ends."""

import gc
import threading
from typing import Any
from weakref import ref

import pytest
import torch

from megascale.grad_sync import message_thread
from megascale.grad_sync.message_thread import MessageThread
from megascale.grad_sync.reduction import ReduceThread
from megascale.utils.collectives import LostMessage

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the threads of other tests alone."""
    monkeypatch.setattr(message_thread, "_running", {})


def _started() -> tuple[MessageThread, threading.Thread]:
    messages = MessageThread()
    messages.result(messages.submit(lambda: None))
    [thread] = message_thread._running
    return messages, thread


def test_tasks_run_in_order_and_raise_where_they_are_waited_for() -> None:
    """A task that fails does not stop those after it."""
    messages, seen = MessageThread(), list[int]()
    futures = [messages.submit(lambda index=index: seen.append(10 // index)) for index in (5, 0, 2)]  # type: ignore[misc]
    messages.result(futures[2])
    assert seen == [2, 5]
    with pytest.raises(ZeroDivisionError):
        messages.result(futures[1])
    messages.close()


def test_what_a_task_held_is_free_when_its_end_is_told() -> None:
    """Who waits for a task may free memory that the task has used: the thread keeps nothing of it for a moment more."""
    messages, begin, kept = MessageThread(), threading.Event(), list[bool]()

    class Memory:
        def task(self) -> None:
            assert begin.wait(LIMIT_S)

    memory = Memory()
    found = ref(memory)
    future = messages.submit(memory.task)
    future.add_done_callback(lambda _: kept.append(found() is not None))
    del memory
    begin.set()
    messages.result(future)
    messages.close()
    assert kept == [False]


def test_the_thread_waits_for_no_task_of_its_own() -> None:
    """It would wait for ever: Python's collector, in that thread, may free what then waits for later tasks."""
    messages, is_ready, later = MessageThread(), threading.Event(), list[Any]()

    def task() -> None:
        assert is_ready.wait(LIMIT_S)
        messages.result(later[0])

    first = messages.submit(task)
    later.append(messages.submit(lambda: None))
    is_ready.set()
    first.result(LIMIT_S)
    later[0].result(LIMIT_S)
    messages.close()


@pytest.mark.parametrize("end", ["closed", "freed"])
def test_an_owner_that_goes_leaves_nothing(end: str) -> None:
    """Invariant 11: its thread, which keeps no process alive, ends, and nobody lists it any more."""
    messages, thread = _started()
    assert thread.daemon
    if end == "closed":
        messages.close()
    else:
        del messages
        gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert not message_thread._running


def test_the_end_of_the_process_ends_idle_threads() -> None:
    """It waits for them, so that none is in torch while the interpreter goes; an owner may still be there."""
    messages, thread = _started()
    message_thread._end_all()
    assert not thread.is_alive()
    messages.close()


def test_a_closed_one_starts_anew() -> None:
    """The next task has a thread of its own."""
    messages, first = _started()
    messages.close()
    first.join(LIMIT_S)
    messages.result(messages.submit(lambda: None))
    [second] = message_thread._running
    assert second is not first
    messages.close()
    second.join(LIMIT_S)


def test_a_closed_one_gives_up_its_memory() -> None:
    """Invariant 11: where buckets arrive, too."""
    messages = ReduceThread()
    messages.submit(lambda: None).result(LIMIT_S)
    memory = ref(messages.memory(3, torch.ones(1))._base)
    [thread] = message_thread._running
    messages.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert memory() is None


class _Silent:
    """Messages that do not come. Each look at the connection finds the next of ``lost``, which end with the wait."""

    def __init__(self, lost: list[str]) -> None:
        self.lost = [*lost]
        self.over = threading.Event()

    def wait(self) -> None:
        assert self.over.wait(LIMIT_S)

    def find_lost(self) -> Any:
        if not self.lost:
            self.over.set()
            return None
        found = self.lost.pop(0)
        return LostMessage(found, ConnectionError("closed")) if found else None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lost", "is_lost"), [(["a", "a"], True), (["a", "b", "a"], False), (["a", "", "a"], False), ([], False)]
)
def test_a_message_is_lost_when_two_looks_find_it(
    monkeypatch: pytest.MonkeyPatch, lost: list[str], is_lost: bool
) -> None:
    """Two looks in a row: one may find a message that has just arrived."""
    monkeypatch.setattr(message_thread, "PROBE_INTERVAL_S", 0.01)
    messages, silent = MessageThread(), _Silent(lost)
    future = messages.submit(lambda: messages.wait(silent))  # type: ignore[arg-type]
    if is_lost:
        with pytest.raises(ConnectionError, match="closed"):
            messages.result(future)
        assert not future.done()
        silent.over.set()
    else:
        messages.result(future)
    messages.close()


def test_nobody_looks_before_it_is_time() -> None:
    """A look costs the other rank a message."""
    messages, silent = MessageThread(), _Silent(["a"] * 3)
    future = messages.submit(lambda: messages.wait(silent))  # type: ignore[arg-type]
    threading.Timer(0.05, silent.over.set).start()
    messages.result(future)
    assert len(silent.lost) >= 2  # one when it is over
    messages.close()
