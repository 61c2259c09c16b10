"""One number for the bits of many tensors, at the speed of memory: what ranks compare before a save.

Words of 8 bytes are added up in columns, and each chunk's sums are multiplied into those of all chunks, modulo 2**64.
So a number says where a word lies; only changes in one chunk and one column could cancel, exactly.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.checkpoint.manifest import CHUNK_BYTES
from megascale.checkpoint.tensor_archive import bytes_of
from megascale.main_params.replica_check import digests

_COLUMNS = 509  # a prime: rows of weights do not lie in the same columns
_MULTIPLIER = np.uint64(6364136223846793005)  # odd, so that nothing is lost; Knuth's
_FEW_BYTES = 1 << 18
_BATCH_BYTES = 1 << 20

Words = NDArray[np.uint64]


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return what is equal where two ranks hold the same bits, in as many tensors of the same dtypes, in one order.

    One pass over tensors on the host, by this thread alone. For others see
    :func:`~megascale.main_params.replica_check.digests`.
    """
    there: dict[str, Tensor] = {}
    sums: Words = np.zeros(_COLUMNS, np.uint64)
    for flat in _joined(tensors, there):
        data = np.frombuffer(bytes_of(flat), np.uint8)
        for start in range(0, len(data), CHUNK_BYTES):
            sums = _added(sums, data[start : start + CHUNK_BYTES])
    return hashlib.blake2b(sums.tobytes() + repr(digests(there)).encode(), digest_size=16).hexdigest()


def _joined(tensors: Iterable[Tensor], there: dict[str, Tensor]) -> Iterator[Tensor]:
    """Yield the tensors on the host, flat, neighbours of few bytes and one dtype as one. Others go to ``there``."""
    batch: list[Tensor] = []
    size = 0
    for index, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            there[str(index)] = tensor
            continue
        nbytes = tensor.nbytes
        if batch and (nbytes > _FEW_BYTES or size >= _BATCH_BYTES or batch[0].dtype is not tensor.dtype):
            yield torch._utils._flatten_dense_tensors(batch)
            batch, size = [], 0
        if nbytes > _FEW_BYTES:
            yield tensor.resolve_conj().resolve_neg().contiguous()
        else:
            batch.append(tensor)
            size += nbytes
    if batch:
        yield torch._utils._flatten_dense_tensors(batch)


def _added(sums: Words, data: NDArray[np.uint8]) -> Words:
    """Return the sums with a chunk of bytes more."""
    whole = len(data) // 8 * 8
    words = data[:whole].view(np.uint64)
    rows = len(words) // _COLUMNS
    sums = sums * _MULTIPLIER
    if rows:
        sums += np.add.reduce(words[: rows * _COLUMNS].reshape(rows, _COLUMNS), axis=0)
    rest = np.zeros(_COLUMNS, np.uint64)
    rest[: len(words) - rows * _COLUMNS] = words[rows * _COLUMNS :]
    rest[-1] = int.from_bytes(data[whole:].tobytes() + bytes([len(data) - whole]), "little")
    return sums * _MULTIPLIER + rest
