"""Writes tensors' archives into one file with several threads, and computes the file's checksum.

The place of each archive in the file is known beforehand. The caller's thread copies tensors to the host; each of the
others takes a batch of neighbouring archives, computes its checksum and writes it.
"""

import ctypes
import mmap
import os
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megascale.checkpoint.crc32 import combined
from megascale.checkpoint.manifest import CHUNK_BYTES, FileMark
from megascale.checkpoint.tensor_archive import TensorArchive, bytes_of
from megascale.utils.progress import advance

MOST_THREADS = 4
_BATCH_COUNT = 256
_MOST_PARTS = 1024  # that one call may write: IOV_MAX of POSIX

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.maxsize > 2**32 else None

Batch = list[tuple[TensorArchive, Tensor]]


def write_archives(path: Path, items: Iterable[tuple[TensorArchive, Tensor]]) -> FileMark:
    """Write a new file of archives, one after the other, and wait until it is on disk. Returns its size and checksum.

    Args:
        path: the file, which must not exist.
        items: archives and their tensors, contiguous and on the host. They are taken one by one, so no more than one
            batch for each thread is held at a time.

    Raises:
        OSError: it cannot be written. No thread writes any more then.
    """
    threads = max(2, min(MOST_THREADS, os.cpu_count() or 1))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        whole = FileMark(0, 0)
        running: deque[Future[FileMark]] = deque()
        start = 0
        with ThreadPoolExecutor(threads, "megascale checkpoint file") as pool:
            try:
                for batch in _batches(items):
                    running.append(pool.submit(_write_batch, descriptor, start, batch))
                    start += sum(archive.length for archive, _ in batch)
                    del batch
                    if len(running) == threads:
                        whole = _joined(whole, running.popleft().result())
                while running:
                    whole = _joined(whole, running.popleft().result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return whole


def write_by_torch(path: Path, tensors: Iterable[Tensor]) -> tuple[list[int], FileMark]:
    """Write a new file by calling torch.save for each tensor. Returns the archives' lengths, and size and checksum.

    For a torch whose archives are not known here. It is slower than :func:`write_archives`, and copies a view.
    """
    lengths: list[int] = []
    with open(path, "xb") as stream:
        marked = _Marked(stream)
        for tensor in tensors:
            # torch.save would write the whole storage of a view.
            alone = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
            start = marked.mark.size
            torch.save(alone, marked)  # type: ignore[arg-type]  # it asks for write() and flush() only
            lengths.append(marked.mark.size - start)
            del tensor, alone
            advance(lengths[-1])
        stream.flush()
        os.fsync(stream.fileno())
    return lengths, marked.mark


class _Marked:
    """A file of which size and checksum are taken as it is written."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.mark = FileMark(0, 0)

    def write(self, data: Any) -> int:
        self.mark = FileMark(self.mark.size + len(data), zlib.crc32(data, self.mark.crc32))
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()


def _batches(items: Iterable[tuple[TensorArchive, Tensor]]) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for archive, tensor in items:
        batch.append((archive, tensor))
        size += archive.length
        del tensor
        if size >= CHUNK_BYTES or len(batch) == _BATCH_COUNT:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _joined(first: FileMark, second: FileMark) -> FileMark:
    """Return the mark of ``first`` with ``second`` after it; ``second`` has just been written."""
    advance(second.size)
    return FileMark(first.size + second.size, combined(first.crc32, second.crc32, second.size))


def _write_batch(descriptor: int, start: int, batch: Batch) -> FileMark:
    """Write archives from byte ``start`` of the file. Returns size and CRC-32 of what was written."""
    run = _Run(descriptor, start)
    whole = 0
    for archive, tensor in batch:
        data, own = bytes_of(tensor), 0
        run.add(archive.head)
        for first in range(0, archive.nbytes, CHUNK_BYTES):
            part = data[first : first + CHUNK_BYTES]
            own = zlib.crc32(part, own)
            run.add(part)  # while it is in the processor's cache
        tail = archive.tail_for(own)
        run.add(tail)
        whole = zlib.crc32(tail, combined(zlib.crc32(archive.head, whole), own, archive.nbytes))
    run.write()
    return FileMark(run.end - start, whole)


def start_writeback(descriptor: int, start: int, stop: int) -> None:
    """Let the disk begin with the whole pages from byte ``start`` to ``stop``, so that fsync finds little left.

    Does nothing but on Linux. A page that is on its way to the disk cannot be written, so pages in part are left out.
    An error of the disk is fsync's to report.
    """
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if _sync_file_range is not None and first < last:
        _sync_file_range(descriptor, ctypes.c_int64(first), ctypes.c_int64(last - first), _SYNC_FILE_RANGE_WRITE)


class _Run:
    """Neighbouring bytes of a file, written in large calls from where they lie. ``end``: behind the last one."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor = descriptor
        self._parts: list[bytes | memoryview] = []
        self._size = 0
        self.end = start

    def add(self, part: bytes | memoryview) -> None:
        """Append bytes, which must stay as they are until `write`."""
        self._parts.append(part)
        self._size += len(part)
        if self._size >= CHUNK_BYTES or len(self._parts) == _MOST_PARTS:
            self.write()

    def write(self) -> None:
        """Write what was added. A call may write less than it was given."""
        start, parts = self.end, deque(self._parts)
        self._parts, self._size = [], 0
        while parts:
            count = os.pwritev(self._descriptor, list(parts), self.end)
            self.end += count
            while parts and count >= len(parts[0]):
                count -= len(parts.popleft())
            if count:
                parts[0] = memoryview(parts[0])[count:]
        start_writeback(self._descriptor, start, self.end)
