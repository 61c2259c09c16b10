"""Writes files and folders atomically: they exist in full, also after a power cut, or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def temporary_path(target: Path, state: str) -> Path:
    """Return a new, hidden name beside ``target``, for a file or folder in the ``state`` that the name tells."""
    return target.with_name(f".{target.name}.{state}-{secrets.token_hex(4)}")


def sync_folder(folder: Path) -> None:
    """Wait until the folder's directory entries are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a path to write to; at the end the file is renamed to ``target``, or removed on an error.

    Raises FileExistsError if ``target`` exists by then and ``overwrite`` is False.
    """
    unnamed = temporary_path(target, "incomplete")
    try:
        yield unnamed
        with open(unnamed, "rb") as stream:
            os.fsync(stream.fileno())
        try:
            (os.replace if overwrite else os.link)(unnamed, target)  # a new link takes no name that is there
        except OSError:
            if overwrite or os.path.lexists(target):
                raise
            os.replace(unnamed, target)  # in a file system without hard links
        sync_folder(target.parent)
    finally:
        unnamed.unlink(missing_ok=True)
