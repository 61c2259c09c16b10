"""`megascale.json`, the manifest of a checkpoint: all plain values, and where each tensor lies in which file.

It is written last, so that a folder that has one is complete. Nothing in it is believed before it is checked: every
piece lies in its tensor and in its file, and the pieces of a tensor cover it without overlap.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megascale.checkpoint.directory import MANIFEST_NAME
from megascale.checkpoint.nest import Tree, leaves
from megascale.errors import CheckpointError

FORMAT = 3
BLOCK_BYTES = 1 << 22
"""Bytes that are read, or checksummed, at a time: they are still in the processor's cache."""

Piece = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""A box of a tensor: its key, the box's offsets and sizes in it, in elements, and its first byte in the file."""


@dataclass(frozen=True)
class DataFile:
    """A safetensors file: its size in bytes, the CRC-32 of all of it, and the pieces that it holds."""

    size: int
    crc32: int
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        step: the caller's step number.
        world_size: number of ranks that saved it.
        trees: by part ("model", "optimizer", "user"), the nest without its tensors; parts not saved are missing.
        rank_trees: each rank's own state, in rank order; None for a rank that gave none.
        files: every other file of the checkpoint, by name.
    """

    step: int
    world_size: int
    trees: dict[str, Tree]
    rank_trees: Sequence[Tree]
    files: dict[str, DataFile] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder`` and wait until it is on disk. Raises as `metadata` does."""
        # asdict(self) would copy every leaf of the trees.
        files = {name: asdict(file) for name, file in self.files.items()}
        body = json.dumps({**vars(self), "files": files, "torch": torch.__version__}, separators=(",", ":"))
        self.metadata  # noqa: B018 - what some ranks alone save of a tensor would never load
        with open(folder / MANIFEST_NAME, "x", encoding="utf-8") as stream:
            # The body is a string in the document, so that the checksum is that of a text, not of a form of JSON.
            json.dump({"format": FORMAT, "crc32": zlib.crc32(body.encode()), "body": body}, stream)
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
        # Hostile content fails anywhere below: nested too deep, a number of 5,000 digits, NaN for an offset.
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} has format {document['format']!r}; this version of megascale reads {FORMAT}"
                )
            if document["crc32"] != zlib.crc32(document["body"].encode()):
                raise CheckpointError(f"{path} is damaged: its checksum does not fit; load an earlier checkpoint")
            body = json.loads(document["body"])
            files = {
                name: DataFile(
                    file["size"],
                    file["crc32"],
                    [(key, tuple(offsets), tuple(sizes), start) for key, offsets, sizes, start in file["pieces"]],
                )
                for name, file in body["files"].items()
            }
            found = cls(body["step"], body["world_size"], body["trees"], body["rank_trees"], files)
            found.metadata  # noqa: B018 - checks it
            return found
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}); load an earlier checkpoint"
            ) from error

    @cached_property
    def metadata(self) -> Metadata:
        """What torch's load planner reads: the form of each tensor, and its pieces. Raises CheckpointError."""
        stored = {
            key: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            for tree in (*self.trees.values(), *self.rank_trees)
            for key, shape, dtype in leaves(tree)
        }
        for name, file in self.files.items():
            if Path(name).name != name:
                raise CheckpointError(f"the manifest names {name!r}, which is outside the checkpoint")
            for key, offsets, sizes, start in file.pieces:
                whole = stored[key]
                nbytes = math.prod(sizes) * whole.properties.dtype.itemsize
                if start < 0 or start + nbytes > file.size or not _is_inside(offsets, sizes, whole.size):
                    raise CheckpointError(
                        f"the manifest is damaged: a piece of {key!r} does not lie in its tensor of shape "
                        f"{tuple(whole.size)}, or not in its file {name!r}; load an earlier checkpoint"
                    )
                whole.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        for key, whole in stored.items():
            # torch's planner would leave what no piece covers as it is in memory.
            if whole.size.numel() and not _cover(whole.size, [(c.offsets, c.sizes) for c in whole.chunks]):
                raise CheckpointError(
                    f"the pieces of {key!r} do not cover its shape {tuple(whole.size)} once: the manifest is "
                    "damaged, or ranks that hold a part of it did not take part in the save; load an earlier checkpoint"
                )
        return Metadata(dict(stored))

    def verify(self, folder: Path, *, part: int = 0, parts: int = 1, checksums: bool = True) -> None:
        """Check size and checksum (or only size) of every ``parts``-th file, beginning with the ``part``-th.

        Raises:
            CheckpointError: one is missing or differs; the message names it.
        """
        for name, expected in sorted(self.files.items())[part::parts]:
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; load an earlier checkpoint")
            if (size := path.stat().st_size) != expected.size:
                raise CheckpointError(
                    f"{path} has {size} bytes, {expected.size} were written; load an earlier checkpoint"
                )
            if checksums and _crc32_of(path) != expected.crc32:
                raise CheckpointError(f"{path} is damaged: its checksum does not fit; load an earlier checkpoint")


def _is_inside(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a box lies in a tensor. Raises ValueError for another number of dimensions."""
    return all(0 <= at <= at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True))


def _cover(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether boxes inside a tensor cover each element once.

    Where every corner but those of the whole tensor belongs to an even number of boxes, each element is in an odd
    number of them; and where sizes add up to the whole, in one.
    """
    missing, corners = math.prod(shape), set(product(*((0, size) for size in shape)))
    for offsets, sizes in boxes:
        missing -= math.prod(sizes)
        for corner in product(*((at, at + size) for at, size in zip(offsets, sizes, strict=True))):
            corners ^= {corner}
    return missing == 0 and not corners


def _crc32_of(path: Path) -> int:
    crc = 0
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
