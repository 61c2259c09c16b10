"""A disk that is full or read-only, and a directory that vanishes, during a save of two ranks."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megascale.checkpoint import Checkpointer, latest
from megascale.errors import CheckpointError
from tests.distributed.test_distributed_optimizer import flat, net, same, sharded, weights
from tests.pool import RankPool
from tests.reliability.faults import Fault

DISK_BYTES = 1 << 20
LEFT_BYTES = 8192
"""What a full disk still takes, so that the save fails in the middle of a file."""


def why_not(folder: Path) -> str:
    """Return why no disk can be mounted at ``folder``; "" where it can."""
    if os.geteuid() != 0:
        return "mounting a small disk needs root"
    try:
        with small_disk(folder / "tried"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"a small disk cannot be mounted here: {error.stderr.strip()}"


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """Mount a disk of DISK_BYTES in memory at ``place``. Raises CalledProcessError."""
    place.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "megascale-test", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True, text=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)


def _fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(4096)):
            pass
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - LEFT_BYTES)


def _remove_when_written(disk: Path) -> None:
    """Remove all checkpoints when this process opens its data file."""
    pending = [disk]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and pending and str(arguments[0]).endswith(".safetensors"):
            shutil.rmtree(pending.pop() / "checkpoints")

    sys.addaudithook(hook)


DISKS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], str]] = {
    "the disk is full": (_fill, lambda disk: (disk / "filler").unlink(), r"No space left on device|written fully"),
    "the disk is read-only": (
        lambda disk: _mount("-o", "remount,ro", str(disk)),
        lambda disk: _mount("-o", "remount,rw", str(disk)),
        "Read-only file system",
    ),
    "the directory vanishes": (_remove_when_written, lambda disk: None, "No such file or directory"),
}
"""What is done before a save, how it is undone, and what the error must say."""


def save_on(disk: Path, kind: str, asynchronous: bool) -> tuple[str, bool, bool]:
    """Save a first and a second time, the second with a fault, and, without it, a third time.

    Returns the error of the second, whether the first was still the latest then, and whether the third loads.
    """
    inject, undo, _ = DISKS[kind]
    module = net()
    optimizer = sharded(module)
    checkpointer = Checkpointer(disk / "checkpoints", async_save=asynchronous)
    checkpointer.save(1, module, optimizer)
    checkpointer.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        inject(disk)
    dist.barrier()
    error = ""
    try:
        checkpointer.save(2, module, optimizer)
        checkpointer.wait()
    except CheckpointError as refused:
        error = str(refused)
    found = latest(disk / "checkpoints")
    dist.barrier()
    if dist.get_rank() == 0:
        undo(disk)
    dist.barrier()
    checkpointer.save(3, module, optimizer)
    checkpointer.wait()
    loaded, loaded_optimizer = net(seed=1), None
    loaded_optimizer = sharded(loaded)
    checkpointer.load(loaded, loaded_optimizer)
    whole = same(weights(loaded), weights(module)) and same(
        flat(loaded_optimizer.state_dict()), flat(optimizer.state_dict())
    )
    names = sorted(path.name for path in (disk / "checkpoints").iterdir())
    return error, found is not None and found.name == "step_00000001", whole and names[-1] == "step_00000003"


def broken_disks(folder: Path, ranks: RankPool) -> Iterator[Fault]:
    """Inject each of DISKS into a save, and into a save in the background."""
    for kind, (_, _, named) in DISKS.items():
        for asynchronous in (False, True):
            place = folder / f"{kind} {asynchronous}".replace(" ", "_")
            with small_disk(place), ranks.spawn(2, save_on, place, kind, asynchronous) as fresh:
                first, second = fresh.results()
            error, kept, goes_on = first
            held = first == second and re.search(named, error) is not None and goes_on
            held = held and (kept or kind == "the directory vanishes")
            when = "in the background" if asynchronous else "while saving"
            shown = error.replace(str(place), "…")
            yield Fault("disk", f"{kind} {when}", f"CheckpointError on all ranks: {shown}", held)
