"""The zip archive that torch.save writes for one tensor: the bytes before and after the tensor's own.

Those bytes depend only on dtype and shape, but for the CRC-32 of the tensor's bytes, which stands in two places. So
they are made once for each dtype and shape, and thousands of small tensors need no pickle and no zip writer each.
torch.save itself makes them, under ``torch.serialization.skip_data``. One record differs from that of a save with data:
`.data/serialization_id`, a hash of the content, is that of a tensor without bytes. torch.load does not read it.

A load takes the tensor's own bytes from the place that the archive's directory names. The pickle before them is for
torch.load alone.
"""

import io
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import torch
from torch import Tensor
from typing_extensions import override

_DESCRIPTOR = b"PK\x07\x08"  # of a record, after its bytes: CRC-32, sizes
_ENTRY = b"PK\x01\x02"  # of a record, in the directory at the end of the archive
_CRC_IN_DESCRIPTOR, _CRC_IN_ENTRY, _NAME_IN_ENTRY = 4, 16, 46
_DATA_NAME, _DATA_SUFFIX = b"archive/data/0", "/data/0"
_LENGTHS_IN_HEADER = 26  # of a record, before its bytes: of its name and of what lies between name and bytes


@dataclass(frozen=True)
class TensorArchive:
    """The bytes around those of a contiguous tensor.

    Attributes:
        head, tail: what comes before and after the tensor's bytes.
        nbytes: how many bytes the tensor has.
        crc_places: offsets in ``tail`` at which the CRC-32 of the tensor's bytes belongs, little-endian.
    """

    head: bytes
    tail: bytes
    nbytes: int
    crc_places: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of the whole archive."""
        return len(self.head) + self.nbytes + len(self.tail)

    def tail_for(self, crc32: int) -> bytes:
        """Return the tail for a tensor whose bytes have this CRC-32."""
        tail = bytearray(self.tail)
        for place in self.crc_places:
            struct.pack_into("<I", tail, place, crc32)
        return bytes(tail)


def archive_of(dtype: torch.dtype, shape: torch.Size) -> TensorArchive | None:
    """Return the archive of tensors of ``dtype`` and ``shape``; None if this torch writes it in a form unknown here.

    For each dtype one archive is tested first: torch.load must read a tensor from it.
    """
    return _archive_of(dtype, shape) if _is_read_by_torch(dtype) else None


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host. They are the tensor's own memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_archive(stream: BinaryIO, start: int, length: int, tensor: Tensor) -> None:
    """Fill a contiguous tensor on the host from the archive of ``length`` bytes at ``start``. Unpickles nothing.

    Raises zipfile.BadZipFile or ValueError for an archive that is damaged or holds another number of bytes.
    """
    if not tensor.nbytes:
        return
    with zipfile.ZipFile(_Window(stream, start, length)) as archive:
        records = archive.infolist()
    # zipfile reads an archive that begins before the window, too.
    data = [one for one in records if one.filename.endswith(_DATA_SUFFIX)]
    if min(one.header_offset for one in records) != 0 or len(data) != 1:
        raise ValueError("that is no archive of one tensor")
    if data[0].compress_type or data[0].file_size != tensor.nbytes:
        raise ValueError(f"the archive has {data[0].file_size} bytes, {tensor.nbytes} are expected")
    stream.seek(start + data[0].header_offset + _LENGTHS_IN_HEADER)
    of_name, of_rest = (int.from_bytes(stream.read(2), "little") for _ in range(2))
    stream.seek(of_name + of_rest, os.SEEK_CUR)
    if stream.readinto(bytes_of(tensor)) != tensor.nbytes:  # type: ignore[attr-defined]
        raise ValueError("the file is cut off")


class _Window(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    @override
    def readinto(self, target: Any) -> int:
        self._stream.seek(self._start + self._at)
        found = self._stream.read(max(0, min(len(target), self._length - self._at)))
        target[: len(found)] = found
        self._at += len(found)
        return len(found)


@lru_cache(maxsize=4096)
def _archive_of(dtype: torch.dtype, shape: torch.Size) -> TensorArchive | None:
    parts: Any = _Parts()
    sample = torch.empty(shape, dtype=dtype)  # its memory is never touched
    with torch.serialization.skip_data():
        torch.save(sample, parts)
    if len(parts.skipped) != 1 or parts.skipped[0][1] != sample.nbytes:
        if parts.skipped or sample.nbytes:
            return None
        return TensorArchive(bytes(parts.written), b"", 0, ())
    at, nbytes = parts.skipped[0]
    head, tail = bytes(parts.written[:at]), bytes(parts.written[at:])
    name = tail.find(_DATA_NAME)
    entry = name - _NAME_IN_ENTRY
    if tail[: len(_DESCRIPTOR)] != _DESCRIPTOR or name < 0 or tail[entry : entry + len(_ENTRY)] != _ENTRY:
        return None
    return TensorArchive(head, tail, nbytes, (_CRC_IN_DESCRIPTOR, entry + _CRC_IN_ENTRY))


@lru_cache
def _is_read_by_torch(dtype: torch.dtype) -> bool:
    """Return whether torch.load reads a tensor of ``dtype`` from its archive, with the bits that were written."""
    shape = torch.Size((3, 2))
    archive = _archive_of(dtype, shape)
    if archive is None:
        return False
    data = (bytes((1, 0)) * archive.nbytes)[: archive.nbytes]  # of every dtype, bool too
    whole = archive.head + data + archive.tail_for(zlib.crc32(data))
    try:
        read = torch.load(io.BytesIO(whole), weights_only=True)
        return (read.dtype, read.shape, bytes(bytes_of(read))) == (dtype, shape, data)
    except Exception:
        return False


class _Parts:
    """A file for torch.save: keeps what is written, and where and how many bytes are skipped."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.skipped: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        self.written += data
        return len(data)

    def seek(self, count: int, whence: int = 0) -> int:
        if whence != 1:
            raise io.UnsupportedOperation("only forward from here")
        self.skipped.append((len(self.written), count))
        return len(self.written) + sum(length for _, length in self.skipped)

    def flush(self) -> None:
        pass
