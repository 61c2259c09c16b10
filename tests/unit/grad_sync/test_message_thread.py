"""MessageThread: its tasks run in order, and it ends when it is closed, freed, or the process ends."""

import gc
import threading

import pytest

from megascale.grad_sync import message_thread
from megascale.grad_sync.message_thread import MessageThread

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
