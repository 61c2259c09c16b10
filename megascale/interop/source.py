"""Source: the input of a conversion (a dict, file, folder or live object), opened once."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.errors import ArgumentTypeError, InteropError, MegascaleError
from megascale.interop.files import read_file
from megascale.interop.records import kind_of


@dataclass(frozen=True)
class Source:
    """Either content or a folder of files.

    Attributes:
        where: its name in messages.
        content: of a file or an object; None for a folder.
        folder: its path; None otherwise.
    """

    where: str
    content: Any = None
    folder: Path | None = None

    def files(self, *patterns: str) -> list[Path]:
        """Return the folder's files that match the patterns, sorted; none without a folder."""
        folder = self.folder
        return [] if folder is None else sorted(path for pattern in patterns for path in folder.glob(pattern))

    def entry(self, key: str) -> Any:
        """Return ``content[key]``, or None."""
        return self.content.get(key) if isinstance(self.content, Mapping) else None

    def top_keys(self) -> set[Any]:
        """Return the content's keys."""
        return set(self.content) if isinstance(self.content, Mapping) else set()


@contextmanager
def damage_named(where: str) -> Iterator[None]:
    """Turn any error of a reader into InteropError: a file may hold anything under the expected keys."""
    try:
        yield
    except MegascaleError:
        raise
    except Exception as error:
        raise InteropError(
            f"{where} is damaged, or of a version that is not known ({type(error).__name__}: {error})"
        ) from error


def open_source(given: Any) -> Source:
    """Open a dict (or a list of them), a path, an object with ``state_dict()``, or a pickled or live loss scaler.

    Raises:
        InteropError: there is no such file, or it cannot be read.
        ArgumentTypeError: for an object of another kind.
    """
    if isinstance(given, (Mapping, list, tuple)):
        return Source("the given state", given)
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        if path.is_dir():
            return Source(str(path), folder=path)
        if not path.is_file():
            raise InteropError(f"{path} does not exist; pass a checkpoint's file or folder")
        return Source(str(path), read_file(path))
    if callable(getattr(given, "state_dict", None)):
        return Source(f"the given {type(given).__name__}", given.state_dict())
    if hasattr(given, "cur_scale"):
        return Source(f"the given {type(given).__name__}", given)
    raise ArgumentTypeError(
        f"source must be a state dict, a path, or an object with state_dict(), got a {kind_of(given)}"
    )
