"""Host memory that an asynchronous save copies tensors into, kept from one save to the next.

torch copies a tensor of some 30,000 elements or more by all its threads, and each copy waits for the slowest of them.
Where another process runs on the same cores, that is milliseconds for each tensor. So large tensors are copied in
chunks by threads of our own that take the next chunk when they are done, and small ones in one call.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest

import torch
from torch import Tensor, nn

from megascale.checkpoint.manifest import CHUNK_BYTES

_MOST_THREADS = 4
_FEW_ELEMENTS = 1 << 14  # torch copies so few by one thread

Chunk = tuple[int, int, int]


class Staging:
    """Host memory for copies of tensors: fresh pages cost more than the copies."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def copied(self, live: Sequence[Tensor]) -> list[Tensor]:
        """Return copies, valid until the next call. Memory is kept for a tensor of the same place, shape and dtype."""
        held = [there for there, _ in zip_longest(self._held[: len(live)], live)]
        self._held = [
            there
            if there is not None and there.shape == tensor.shape and there.dtype == tensor.dtype
            else torch.empty(tensor.shape, dtype=tensor.dtype)
            for there, tensor in zip(held, live, strict=True)
        ]
        copy_to_host(self._held, live)
        return list(self._held)


@torch.no_grad()
def copy_to_host(held: Sequence[Tensor], live: Sequence[Tensor]) -> None:
    """Copy each of ``live`` into the tensor of ``held`` of the same place: contiguous, on the host, of its form."""
    chunks: list[Chunk] = []
    few: tuple[list[Tensor], list[Tensor]] = ([], [])
    for there, tensor in zip(held, live, strict=True):
        if not tensor.is_cpu:
            there.copy_(tensor)
        elif there.numel() <= _FEW_ELEMENTS or not _is_plain(tensor):
            few[0].append(there)
            few[1].append(tensor)
        else:
            chunks += _chunks(there.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    if few[0]:
        torch._foreach_copy_(*few)
    _copy_chunks(chunks)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes are its values, one after the other."""
    known = type(tensor) in (Tensor, nn.Parameter)
    # Zeros without memory have no address.
    return known and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and tensor.data_ptr() != 0


def _chunks(target: int, source: int, nbytes: int) -> Iterable[Chunk]:
    for start in range(0, nbytes, CHUNK_BYTES):
        yield target + start, source + start, min(CHUNK_BYTES, nbytes - start)


def _copy_chunks(chunks: Sequence[Chunk]) -> None:
    """Copy memory: target, source and bytes of each chunk. The interpreter's lock is free meanwhile."""
    waiting = deque(chunks)

    def work() -> None:
        with suppress(IndexError):  # raised where no chunk is left
            while True:
                ctypes.memmove(*waiting.popleft())

    others = min(_MOST_THREADS, os.cpu_count() or 1, len(chunks)) - 1
    if others < 1:
        work()
        return
    with ThreadPoolExecutor(others, "megascale checkpoint copy") as pool:
        running = [pool.submit(work) for _ in range(others)]
        work()
        for other in running:
            other.result()
