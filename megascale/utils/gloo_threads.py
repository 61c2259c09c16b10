"""Lets gloo's threads release their last tensors at the end of a process, while Python still runs.

A gloo thread releases a collective's tensors after it has reported the collective's end, and needs Python's lock for
that. If it asks for the lock when the interpreter is shutting down, Python ends the thread inside a destructor, and the
process aborts: "terminate called without an active exception", SIGABRT, at the end of a successful training run
(https://github.com/pytorch/pytorch/issues/190489). On a busy machine such a thread can be that late. Only a process
group whose last reference is gone waits for its threads; ``destroy_process_group()`` leaves groups to which an
optimizer, a DistributedDataParallel or a variable still refers.
"""

import atexit
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_THREADS = Path("/proc/self/task")
_WORKER = "pt_gloo_runloop"
"""The name that torch gives to the threads that run gloo's collectives."""
_QUIET_LOOKS = 3
"""How many times in a row all of them must be found asleep."""
_PATIENCE_S = 5.0


@atexit.register
def let_workers_finish() -> None:
    """Sleep, so that Python's lock is free, until no worker thread of gloo's runs or wants to run."""
    end = time.monotonic() + _PATIENCE_S
    quiet_looks = 0
    while quiet_looks < _QUIET_LOOKS and time.monotonic() < end and any(_worker_states()):
        # A thread that waits for the lock gets it within a switch interval, even while other threads run Python.
        time.sleep(min(sys.getswitchinterval(), 0.05))
        quiet_looks = quiet_looks + 1 if all(state == "S" for state in _worker_states()) else 0


def _worker_states() -> Iterator[str]:
    """Yield the state letter of each worker thread, as proc(5) has it; S is asleep."""
    for thread in _THREADS.glob("*"):
        try:
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has just ended
            continue
        if name == _WORKER:
            yield rest.split()[0]
