"""The directory of checkpoints: their names, the latest one, and removal of old ones.

A checkpoint is written into `.step_00000040.incomplete-<token>` and renamed to `step_00000040` when every byte is on
disk. One to be removed is renamed to `.step_00000040.removed-<token>` first. So a folder with the plain name is
complete, whenever the writers were killed.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from megascale.errors import CheckpointError, listed
from megascale.utils.atomic_files import sync_folder, temporary_path

MANIFEST_NAME = "megascale.json"
_COMPLETE = re.compile(r"step_(\d{8,})")
_INCOMPLETE = re.compile(r"\.step_\d{8,}\.incomplete-\w+")
_REMOVED = re.compile(r"\.step_\d{8,}\.removed-\w+")


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint of the highest step in ``directory``, None if there is none.

    Answers from this rank's file system alone; `Checkpointer.latest` gives all ranks the same answer.
    """
    folders = complete(Path(directory))
    return folders[max(folders)] if folders else None


def complete(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, lowest first."""
    return {step: folder for step, folder in named(directory).items() if (folder / MANIFEST_NAME).is_file()}


def named(directory: Path) -> dict[int, Path]:
    """Return all folders that have a checkpoint's name, by step, lowest first."""
    found = {int(match[1]): entry for entry, match in _matching(directory, _COMPLETE)}
    return dict(sorted(found.items()))


def unfinished_saves(directory: Path) -> list[Path]:
    """Return folders of saves that were interrupted or are still running."""
    return [entry for entry, _ in _matching(directory, _INCOMPLETE)]


def path_of(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``, which need not exist."""
    return directory / f"step_{step:08d}"


def find(path: Path, step: int | None) -> Path:
    """Return the checkpoint at ``path``: itself, or inside it the one of ``step``, or the latest.

    Raises:
        CheckpointError: there is none; the message lists the content.
    """
    if (path / MANIFEST_NAME).is_file() and (step is None or path.name == path_of(path.parent, step).name):
        return path
    if not path.is_dir():
        fault = "it is not a folder" if path.exists() else "the folder does not exist"
        raise CheckpointError(f"no checkpoint at {path}: {fault}")
    folders = complete(path)
    if not folders:
        unfinished = [folder.name for folder in unfinished_saves(path)]
        hint = f"; unfinished are {listed(unfinished)}: the save was killed, or runs still: wait() for it"
        raise CheckpointError(
            f"no complete checkpoint in {path}: expected folders named like {path_of(path, 40).name}"
            f"{hint if unfinished else ''}"
        )
    if step is None:
        return folders[max(folders)]
    if step not in folders:
        raise CheckpointError(f"no checkpoint of step {step} in {path}; there are steps {', '.join(map(str, folders))}")
    return folders[step]


def begin(directory: Path, step: int) -> Path:
    """Create the folder to write the checkpoint of ``step`` into, and remove remains of killed saves.

    Raises:
        CheckpointError: the checkpoint exists already.
    """
    target = path_of(directory, step)
    if os.path.lexists(target):  # also as a link to nowhere, which the rename at the end would not replace
        raise CheckpointError(
            f"the checkpoint {target} exists already; delete it, save another step, or choose another directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for stale in unfinished_saves(directory):
        # Renamed before its files go: who writes into it still, as another Checkpointer does, gets an error, and does
        # not complete a folder of which files are missing. What cannot be renamed, as another user's, stays.
        with contextlib.suppress(OSError):
            os.rename(stale, temporary_path(target, "removed"))
    finish_removals(directory)
    folder = temporary_path(target, "incomplete")
    folder.mkdir()
    return folder


def commit(folder: Path, directory: Path, step: int) -> None:
    """Rename a written folder to its final name; then the checkpoint exists, also after a power cut."""
    sync_folder(folder)
    os.rename(folder, path_of(directory, step))
    sync_folder(directory)


def prune(directory: Path, keep_last: int, saved_step: int) -> None:
    """Remove all but ``keep_last`` checkpoints: keep the one just saved, and the highest steps of the others."""
    folders = complete(directory)
    others = [step for step in folders if step != saved_step]
    for step in others[: max(0, len(others) - (keep_last - 1))]:
        os.rename(folders[step], temporary_path(folders[step], "removed"))
    finish_removals(directory)


def finish_removals(directory: Path) -> None:
    """Remove what `prune` has renamed, here or in a process that was killed before it could remove it."""
    for entry, _ in _matching(directory, _REMOVED):
        shutil.rmtree(entry, ignore_errors=True)


def _matching(directory: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    if not directory.is_dir():
        return
    for entry in sorted(directory.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match and entry.is_dir():
            yield entry, match
