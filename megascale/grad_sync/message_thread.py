"""A thread that exchanges messages with other ranks, or updates in host memory, while the program goes on."""

import atexit
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread, current_thread
from weakref import finalize

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

    def result(self, future: "Future[None]") -> None:
        """Wait for the end of a task, and raise what it raised.

        The thread itself does not wait: it would wait for ever, and runs that task next. It comes here where Python's
        garbage collector, which runs in any thread, frees what waits for its tasks when it is freed.
        """
        if current_thread() is not self._thread:
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
