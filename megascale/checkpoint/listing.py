"""Lists a directory of checkpoints: every step, its size, whether it is intact, and which is the latest."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megascale.checkpoint import directory as folders
from megascale.checkpoint.manifest import Manifest
from megascale.errors import CheckpointError


@dataclass(frozen=True)
class Listed:
    """One checkpoint, or the remains of an interrupted save.

    Attributes:
        path: its folder.
        size: bytes of all files in it.
        step: None for remains of a save.
        world_size: number of ranks that saved it; None if it cannot be read.
        damage: what is wrong with it; None for an intact checkpoint.
        latest: whether it is the one that is loaded by default.
    """

    path: Path
    size: int
    step: int | None
    world_size: int | None
    damage: str | None
    latest: bool


def listing(directory: Path, *, checksums: bool = True) -> Iterator[Listed]:
    """Yield the checkpoints in ``directory``, lowest step first, then saves that were killed or are running.

    Args:
        directory: of checkpoints.
        checksums: read and compare every byte of every checkpoint. False: only names and sizes of files.
    """
    latest = folders.latest(directory)
    for step, folder in folders.named(directory).items():
        world_size, damage = _inspected(folder, checksums)
        yield Listed(folder, _size(folder), step, world_size, damage, folder == latest)
    for folder in folders.unfinished_saves(directory):
        yield Listed(folder, _size(folder), None, None, "incomplete: still being written, or its writer died", False)


def _inspected(folder: Path, checksums: bool) -> tuple[int | None, str | None]:
    """Return the number of ranks that saved a checkpoint, and its damage."""
    world_size: int | None = None
    try:
        manifest = Manifest.read(folder)
        world_size = manifest.world_size
        manifest.verify(folder, checksums=checksums)
    except (CheckpointError, OSError) as error:
        return world_size, str(error).removesuffix("; load an earlier checkpoint")
    return world_size, None


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
