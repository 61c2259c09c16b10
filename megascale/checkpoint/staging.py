"""Host memory that an asynchronous save copies tensors into, kept from one save to the next.

torch copies a tensor of some 30,000 elements or more by all its threads, and each copy waits for the slowest of them.
Where another process runs on the same cores, that is milliseconds for each tensor. So large tensors are copied in
chunks, and small ones by the batch, by threads of our own that take the next task when they are done.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn

from megascale.checkpoint.manifest import CHUNK_BYTES

_MOST_THREADS = 4
_FEW_ELEMENTS = 1 << 14  # torch copies so few by one thread
_BATCH_COUNT = 1024

Task = Callable[[], object]


class Staging:
    """Host memory for copies of tensors: fresh pages cost more than the copies."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._few: list[int] = []
        self._many: list[int] = []
        self._known: object = None

    def copied(self, live: Sequence[Tensor], known: object = None) -> list[Tensor]:
        """Return copies, valid until the next call. Memory is kept for a tensor of the same place, shape and dtype.

        ``known``: not None, and equal to that of the call before, where all tensors have the same shapes and dtypes.
        """
        if known is None or known != self._known:
            self._known = None
            self._prepare(live)
            self._known = known
        copy_to_host(self._held, live, self._few, self._many)
        return list(self._held)

    def _prepare(self, live: Sequence[Tensor]) -> None:
        """Hold memory for ``live``."""
        held = [there for there, _ in zip_longest(self._held[: len(live)], live)]
        self._held = [
            there
            if there is not None and there.shape == tensor.shape and there.dtype == tensor.dtype
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for there, tensor in zip(held, live, strict=True)
        ]
        is_small = [there.numel() <= _FEW_ELEMENTS for there in self._held]
        self._few = [index for index, is_few in enumerate(is_small) if is_few]
        self._many = [index for index, is_few in enumerate(is_small) if not is_few]


def copy_to_host(held: Sequence[Tensor], live: Sequence[Tensor], few: Sequence[int], many: Sequence[int]) -> None:
    """Copy each of ``live`` into the tensor of ``held`` of the same place: contiguous, on the host, of its form.

    ``few`` and ``many`` are the places of those of few and of many elements.
    """
    tasks: list[Task] = []
    for start in range(0, len(few), _BATCH_COUNT):
        places = few[start : start + _BATCH_COUNT]
        targets, sources = [held[index] for index in places], [live[index] for index in places]
        if all(source.is_cpu for source in sources):
            tasks.append(partial(_copy, targets, sources))
        else:
            _bring(targets, sources)
    for index in many:
        if _is_plain(live[index]):
            tasks += _copies_of_chunks(held[index].data_ptr(), live[index].data_ptr(), live[index].nbytes)
        else:
            _bring([held[index]], [live[index]])
    _run(tasks)


@torch.no_grad()
def _copy(held: list[Tensor], live: list[Tensor]) -> None:
    torch._foreach_copy_(held, live)


@torch.no_grad()
def _bring(held: list[Tensor], live: list[Tensor]) -> None:
    """Copy tensors of any device, on the caller's stream: another thread's would not wait for the step's."""
    for target, source in zip(held, live, strict=True):
        target.copy_(source)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes are its values, one after the other, on the host."""
    known = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu
    # Zeros without memory have no address.
    return known and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and tensor.data_ptr() != 0


def _copies_of_chunks(target: int, source: int, nbytes: int) -> Iterator[Task]:
    for start in range(0, nbytes, CHUNK_BYTES):
        yield partial(ctypes.memmove, target + start, source + start, min(CHUNK_BYTES, nbytes - start))


def _run(tasks: Sequence[Task]) -> None:
    """Run tasks that leave the interpreter's lock free."""
    waiting = deque(tasks)

    def work() -> None:
        while True:
            try:
                task = waiting.popleft()
            except IndexError:
                return
            task()

    others = min(_MOST_THREADS, os.cpu_count() or 1, len(tasks)) - 1
    if others < 1:
        work()
        return
    with ThreadPoolExecutor(others, "megascale checkpoint copy") as pool:
        running = [pool.submit(work) for _ in range(others)]
        work()
        for other in running:
            other.result()
