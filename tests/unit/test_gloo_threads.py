"""The end of a process that used gloo."""

import sys
from contextlib import ExitStack

import pytest

from tests.jobs import job

_LATE = """
import sys, time
import torch
import torch.distributed as dist
import megascale

print("trained", flush=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(1000)  # nobody is given Python's lock who has to ask for it
work = dist.all_reduce(torch.ones(3), async_op=True)
while not work.is_completed():
    pass
del work  # now gloo's thread has the last reference, and waits for the lock to drop it
asked = time.monotonic() + 0.2
while time.monotonic() < asked:
    pass
{end}
"""


_ENDS = ["", "dist.destroy_process_group()", "kept = dist.group.WORLD; dist.destroy_process_group()"]
_PROGRAMS = {end: _LATE.format(end=end) for end in _ENDS} | {"no gloo": "import megascale; print('trained')"}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each program has printed when it ended, with status 0. They start together: that takes seconds."""
    with ExitStack() as stack:
        running = {name: stack.enter_context(job([sys.executable, "-c", code])) for name, code in _PROGRAMS.items()}
        return {name: program.finish() for name, program in running.items()}


@pytest.mark.parametrize("end", _ENDS)
def test_a_process_ends_well_whose_gloo_thread_is_late(end: str, printed: dict[str, str]) -> None:
    """Torch alone ends here with SIGABRT: its thread asks for Python's lock when the interpreter is ending."""
    assert printed[end] == "trained\n"


def test_a_process_ends_well_without_gloo(printed: dict[str, str]) -> None:
    """Nothing is waited for."""
    assert printed["no gloo"] == "trained\n"
