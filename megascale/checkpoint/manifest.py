"""`megascale.json`, the manifest of a checkpoint: the data files' content, index, sizes and checksums."""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from megascale.checkpoint.directory import MANIFEST_NAME
from megascale.checkpoint.nest import Tree
from megascale.errors import CheckpointError
from megascale.utils.progress import advance

FORMAT = 1
CHUNK_BYTES = 1 << 22
"""Of a file that are read at a time."""
Index: TypeAlias = Mapping[str, Sequence[Sequence[Any]]]
"""JSON, see :mod:`megascale.checkpoint.index`."""


@dataclass(frozen=True)
class FileMark:
    """Size in bytes and CRC-32 of a data file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        step: the caller's step number.
        world_size: number of ranks that saved it.
        trees: by part ("model", "optimizer", "user"), the nest without its tensors; parts not saved are missing.
        rank_trees: each rank's own state, in rank order; None for a rank that gave none.
        files: size and checksum of every other file of the checkpoint.
        index: where each tensor lies in them; None in a checkpoint of commit 9dbb0b5.
    """

    step: int
    world_size: int
    trees: dict[str, Tree]
    rank_trees: list[Tree]
    files: dict[str, FileMark]
    index: Index | None = None

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder`` and wait until it is on disk."""
        marks = {name: asdict(mark) for name, mark in self.files.items()}
        # asdict(self) would copy every leaf of the trees.
        body = _json({**vars(self), "files": marks, "torch": torch.__version__})
        text = f'{{"format": {FORMAT}, "crc32": {zlib.crc32(body.encode())}, "body": {body}}}'
        with open(folder / MANIFEST_NAME, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of the checkpoint ``folder``.

        Raises:
            CheckpointError: it is missing, damaged, or of a format that this version does not read.
        """
        path = folder / MANIFEST_NAME
        if not path.is_file():
            raise CheckpointError(
                f"{folder} is not a checkpoint of megascale as seen from here: it has no {MANIFEST_NAME}"
            )
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} has format {document['format']!r}; this version of megascale reads {FORMAT}"
                )
            body = document["body"]
            if document["crc32"] != zlib.crc32(_json(body).encode()):
                raise CheckpointError(f"{path} is damaged: its checksum does not fit; load an earlier checkpoint")
            files = {name: FileMark(**mark) for name, mark in body["files"].items()}
            return cls(body["step"], body["world_size"], body["trees"], body["rank_trees"], files, body.get("index"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}); load an earlier checkpoint"
            ) from error

    def nbytes(self, *, part: int, parts: int) -> int:
        """Return the bytes of every ``parts``-th file, beginning with the ``part``-th: what `verify` reads."""
        return sum(self.files[name].size for name in sorted(self.files)[part::parts])

    def verify(self, folder: Path, *, part: int, parts: int, checksums: bool = True) -> None:
        """Check size and checksum (or only size) of every ``parts``-th file, beginning with the ``part``-th.

        Raises:
            CheckpointError: one is missing or differs; the message names it.
        """
        for name in sorted(self.files)[part::parts]:
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; load an earlier checkpoint")
            expected, size = self.files[name], path.stat().st_size
            if size != expected.size:
                raise CheckpointError(
                    f"{path} has {size} bytes, {expected.size} were written; load an earlier checkpoint"
                )
            if checksums and mark_of(path) != expected:
                raise CheckpointError(f"{path} is damaged: its checksum does not fit; load an earlier checkpoint")


def mark_of(path: Path) -> FileMark:
    """Read a file and return its size and checksum."""
    size = crc = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            size += len(chunk)
            advance(len(chunk))
            crc = zlib.crc32(chunk, crc)
    return FileMark(size, crc)


def _json(body: dict[str, Any]) -> str:
    """Return the text of which the manifest has the checksum, whatever its own blanks and order of keys."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
