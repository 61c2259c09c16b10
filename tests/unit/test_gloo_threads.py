"""The end of a process that used gloo."""

import sys

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


@pytest.mark.parametrize(
    "end", ["", "dist.destroy_process_group()", "kept = dist.group.WORLD; dist.destroy_process_group()"]
)
def test_a_process_ends_well_whose_gloo_thread_is_late(end: str) -> None:
    """Torch alone ends here with SIGABRT: its thread asks for Python's lock when the interpreter is ending."""
    with job([sys.executable, "-c", _LATE.format(end=end)]) as program:
        assert program.finish() == "trained\n"


def test_a_process_ends_well_without_gloo() -> None:
    """Nothing is waited for."""
    with job([sys.executable, "-c", "import megascale; print('trained')"]) as program:
        assert program.finish() == "trained\n"
