"""The files of a checkpoint: each rank writes one in the safetensors format, and any rank reads pieces of any.

torch.distributed.checkpoint's planner says which saved pieces make up what a rank loads, at any number of ranks. Here
are the bytes. A whole tensor has its key as its name in the file, a piece of one
has ``key@offset,offset``. Nothing is pickled, and ``safetensors.safe_open`` opens each file.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from megascale.checkpoint.manifest import BLOCK_BYTES, DataFile, Manifest, Piece
from megascale.checkpoint.pieces import Place, bytes_of
from megascale.errors import CheckpointError

SAFETENSORS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
"""Dtypes by their names in the format. A tensor of another dtype is bytes there; the manifest has its dtype."""


def write_file(path: Path, pieces: Mapping[Place, Tensor], data: Iterable[memoryview]) -> dict[str, DataFile]:
    """Write the pieces of this rank, and wait until they are on disk. Returns what the manifest says of the file.

    A rank that has none writes no file. ``data``: the bytes of each piece, row-major, asked for one after the other.
    """
    if not pieces:
        return {}
    # The header comes first in the file, so that each tensor's place must be known before its bytes are.
    header: dict[str, Any] = {}
    written, end = list[Piece](), 0
    for (key, offsets, is_whole), tensor in pieces.items():
        name = key if is_whole else f"{key}@{','.join(map(str, offsets))}"
        start, end = end, end + tensor.nbytes
        shape = tuple(tensor.shape)
        header[name] = (
            {"dtype": SAFETENSORS[tensor.dtype], "shape": shape, "data_offsets": (start, end)}
            if tensor.dtype in SAFETENSORS
            else {"dtype": "U8", "shape": (tensor.nbytes,), "data_offsets": (start, end)}
        )
        written.append((key, offsets, shape, start))
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = struct.pack("<Q", len(head)) + head
    crc = size = 0
    with open(path, "xb", buffering=0) as stream:

        def put(data: bytes | memoryview) -> None:
            nonlocal crc, size
            for at in range(0, len(data), BLOCK_BYTES):
                block = memoryview(data)[at : at + BLOCK_BYTES]
                crc = zlib.crc32(block, crc)  # of bytes that are in the processor's cache for the write
                while block:
                    count = stream.write(block)
                    size, block = size + count, block[count:]

        put(head)
        for of_piece in data:
            put(of_piece)
        os.fsync(stream.fileno())
    return {path.name: DataFile(size, crc, [(*piece[:3], len(head) + piece[3]) for piece in written])}


class PlannedRead:
    """Reads into tensors that were found to have the saved shapes and dtypes. Communicates nothing.

    Each saved piece is read once, in the order of the files.

    Args:
        folder: of the checkpoint.
        manifest: its manifest, as it is there or with other names.
        targets: whole tensors, DTensors or ParamShards, by the keys of the saved tensors.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, or with another shape or dtype than its target.
    """

    def __init__(self, folder: Path, manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
        saved = manifest.metadata.state_dict_metadata
        for key, target in targets.items():
            stored = saved.get(key)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"{folder} holds no tensor {key!r}")
            # torch's planner compares shapes alone, and a copy would convert.
            if (stored.size, stored.properties.dtype) != (target.size(), target.dtype):
                raise CheckpointError(
                    f"{folder} holds {key!r} as {stored.properties.dtype} {tuple(stored.size)}, "
                    f"expected {target.dtype} {tuple(target.size())}"
                )
        self._folder = folder
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(targets), manifest.metadata, is_coordinator=False)
        self._dtypes = {key: target.dtype for key, target in targets.items()}
        self._wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        for item in self._planner.create_local_plan().items:
            piece = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            self._wanted.setdefault(piece, []).append(item)
        places = (
            ((key, offsets), (name, start, sizes))
            for name, file in manifest.files.items()
            for key, offsets, sizes, start in file.pieces
        )
        self._places = {piece: place for piece, place in places if piece in self._wanted}

    def read(self) -> None:
        """Fill the targets in place. The additional memory is one saved piece. Raises CheckpointError."""
        with ExitStack() as stack:
            streams: dict[str, IO[bytes]] = {}
            for (key, offsets), (name, start, sizes) in sorted(self._places.items(), key=lambda one: one[1][:2]):
                if name not in streams:
                    streams[name] = stack.enter_context(open(self._folder / name, "rb", buffering=0))
                saved = torch.empty(sizes, dtype=self._dtypes[key], device="cpu")
                data, stream = bytes_of(saved), streams[name]
                stream.seek(start)
                while data:
                    count = stream.readinto(data[:BLOCK_BYTES])  # type: ignore[attr-defined]
                    if not count:
                        raise CheckpointError(
                            f"{self._folder / name} has become shorter than when it was verified; load an earlier "
                            "checkpoint"
                        )
                    data = data[count:]
                for item in self._wanted[key, offsets]:
                    box = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
                    self._planner.resolve_tensor(item).detach().copy_(saved[box])
