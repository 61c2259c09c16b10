"""The end of a process that used gloo."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megascale.utils import gloo_threads
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


@pytest.mark.slow
@pytest.mark.parametrize("end", _ENDS)
def test_a_process_ends_well_whose_gloo_thread_is_late(end: str, printed: dict[str, str]) -> None:
    """Torch alone ends here with SIGABRT: its thread asks for Python's lock when the interpreter is ending."""
    assert printed[end] == "trained\n"


@pytest.mark.slow
def test_a_process_ends_well_without_gloo(printed: dict[str, str]) -> None:
    """Nothing is waited for."""
    assert printed["no gloo"] == "trained\n"


@pytest.mark.parametrize(
    ("states", "looks"),
    [
        ([""], 1),
        (["S"], 6),
        (["S", "S", "S", "R", "S"], 10),
        (["S", "S", "SS", "RS", "SS"], 10),
        (["R", "R", "R", "R", ""], 5),
    ],
    ids=["no thread", "all asleep", "one wakes up", "one of two wakes up", "the last one ends"],
)
def test_threads_must_be_asleep_several_times_in_a_row(
    states: list[str], looks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that runs may want the lock next: the count begins anew. Without any there is nothing to wait for.

    There are two looks in a round: whether there is a thread, and whether all sleep. The last of ``states`` stays.
    """
    seen: list[str] = []

    def look() -> Iterator[str]:
        seen.append(states[min(len(seen), len(states) - 1)])
        return iter(seen[-1])

    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path)
    monkeypatch.setattr(gloo_threads, "_worker_states", look)
    gloo_threads.let_workers_finish()
    assert len(seen) == looks


def test_states_are_those_of_gloos_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As proc(5) has them, behind a name that may hold brackets; a thread that has just ended has none."""
    stats = {"1": "1 (pt_gloo_runloop) S 5 6", "2": "2 (pt (x) y) R 5", "3": "3 (pt_gloo_runloop) R 5", "4": None}
    for thread, text in stats.items():
        (tmp_path / thread).mkdir()
        if text is not None:
            (tmp_path / thread / "stat").write_text(text)
    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path)
    assert sorted(gloo_threads._worker_states()) == ["R", "S"]
