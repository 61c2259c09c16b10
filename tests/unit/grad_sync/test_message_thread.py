"""MessageThread: its tasks run in order, and it ends when it is closed, freed, or the process ends."""

import gc
import subprocess
import sys
import threading
from typing import Any
from weakref import ref

import pytest
import torch

from megascale.grad_sync import message_thread
from megascale.grad_sync.message_thread import MessageThread
from megascale.grad_sync.reduction import ReduceThread

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


@pytest.mark.slow
@pytest.mark.parametrize(("program", "status", "output"), [(STUCK, 3, ""), (ENDS, 0, "done\n")])
def test_a_process_ends_by_itself(program: str, status: int, output: str) -> None:
    """A thread that waits for a message which never comes keeps no process alive, and changes no status of its own; a
    task that ends by itself is not cut by the interpreter's end.
    """
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout) == (status, output)
