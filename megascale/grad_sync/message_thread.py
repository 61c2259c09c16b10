"""A thread that waits for other ranks' messages, and a wait for that thread that ends when a rank is lost.

When a connection closes, gloo fails the messages that have not begun; a message that has begun waits for the process
group's timeout, half an hour. Such a wait cannot be ended from outside, and a shorter timeout would close the
connections to ranks that are only slow. So a thread waits for messages, and the caller waits for the thread and probes
from time to time whether the connection still exists.
"""

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread, current_thread
from weakref import finalize

from megascale.utils.collectives import LostMessage, Pending

PROBE_INTERVAL_S = 5.0
"""Time between two probes, in seconds. A lost rank is known after two of them at most."""
EXIT_PATIENCE_S = 1.0
"""How long the end of the process waits for a running task, in seconds."""

_Tasks = SimpleQueue[tuple[Callable[[], None], "Future[None]"] | None]
_running: dict[Thread, _Tasks] = {}


class MessageThread:
    """Runs tasks, one after the other, in a thread that starts with the first of them.

    After :meth:`close`, or when this object is freed, the thread ends after its last task. A thread that waits for a
    message which never comes ends with the process group's timeout, and keeps no process alive.
    """

    def __init__(self) -> None:
        self._tasks: _Tasks | None = None
        self._thread: Thread | None = None
        self._awaited: Pending | None = None
        self._end: Callable[[], object] | None = None

    def submit(self, task: Callable[[], None]) -> "Future[None]":
        """Run ``task`` after those before it."""
        if self._tasks is None:
            self._tasks = SimpleQueue()
            self._thread = Thread(target=_serve, args=[self._tasks], name="megascale messages", daemon=True)
            _running[self._thread] = self._tasks
            self._thread.start()
            self._end = finalize(self, self._tasks.put, None)
            self._end.atexit = False
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """Let the thread end after its last task."""
        if self._end is not None:
            self._end()
        self._tasks = self._end = None

    def wait(self, messages: Pending) -> None:
        """Wait for ``messages``. Called by tasks."""
        self._awaited = messages
        try:
            messages.wait()
        finally:
            self._awaited = None

    def result(self, future: "Future[None]") -> None:
        """Wait for the end of a task, and raise what it raised.

        Also raises, as the backend does, if the thread waits for a message whose connection is closed. Two probes in a
        row must find the same message, so that one that has just arrived does not count as lost.

        The thread itself does not wait: it would wait for ever, and runs that task next. It comes here where Python's
        garbage collector, which runs in any thread, frees what waits for its tasks when it is freed.
        """
        if current_thread() is self._thread:
            return
        lost: LostMessage | None = None
        while not future.done():
            with suppress(TimeoutError):  # of this wait, not of the task
                future.exception(PROBE_INTERVAL_S)
            awaited = self._awaited
            before, lost = lost, None if awaited is None else awaited.find_lost()
            if before is not None and lost is not None and before.work is lost.work and not future.done():
                raise lost.error
        future.result()


def _serve(tasks: _Tasks) -> None:
    while (item := tasks.get()) is not None:
        task, future = item
        raised: BaseException | None = None
        try:
            task()
        except BaseException as error:  # result() raises it
            raised = error
        # Before the end is told: whoever waits for it may free what the task held, and the thread keeps nothing alive.
        del item, task
        if raised is None:
            future.set_result(None)
        else:
            future.set_exception(raised)
        del future, raised
    _running.pop(current_thread(), None)


@atexit.register
def _end_all() -> None:
    running = dict(_running)
    for tasks in running.values():
        tasks.put(None)
    for thread in running:
        thread.join(EXIT_PATIENCE_S)
