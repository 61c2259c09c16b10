"""The end of a process that used gloo: its threads let go of their last tensors while Python still runs.

A thread of gloo's drops a collective's tensors after it has told whoever waits that the collective has ended, and needs
Python's lock for that. One that asks for the lock when the interpreter has begun to end is ended by Python inside a
destructor, and the process with it: "terminate called without an active exception", SIGABRT, after the last line of a
training run that has done all its work (https://github.com/pytorch/pytorch/issues/190489). On a busy machine such a
thread can be as late as that. Only a process group whose last reference is gone waits for its threads;
``destroy_process_group()`` leaves those that an optimizer, a DistributedDataParallel or a variable still names.
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
"""How often in a row all of them must be seen asleep."""
_PATIENCE_S = 5.0
_BLIND_S = 0.05
"""How long to wait where the system does not tell what threads do."""


@atexit.register
def let_workers_finish() -> None:
    """Sleep, so that Python's lock is free, until no worker thread of gloo's runs or wants to run."""
    if not _THREADS.is_dir():
        if "torch.distributed" in sys.modules:
            time.sleep(_BLIND_S)
        return
    end = time.monotonic() + _PATIENCE_S
    quiet_looks = 0
    while quiet_looks < _QUIET_LOOKS and time.monotonic() < end:
        if not any(_worker_states()):
            return
        # A thread that waits for the lock gets it within a switch interval, whoever else runs Python.
        time.sleep(min(sys.getswitchinterval(), _BLIND_S))
        quiet_looks = quiet_looks + 1 if all(state == "S" for state in _worker_states()) else 0


def _worker_states() -> Iterator[str]:
    """Yield the state letter of each worker thread, as proc(5) has it; S is asleep."""
    for thread in _THREADS.iterdir():
        try:
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has just ended
            continue
        if name == _WORKER:
            yield rest.split()[0]
