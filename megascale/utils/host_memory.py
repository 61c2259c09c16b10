"""Host memory that device memory is copied into and back, pinned where the device copies faster for it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from megascale.errors import UsageError
from megascale.utils.multiples import rounded_up
from megascale.utils.streams import has_streams

SLAB = 1 << 26
"""Bytes that are allocated at once for small storages. A power of two: torch's pinned allocator rounds up to one."""
ALIGNMENT = 512
"""In bytes: where each storage's copy begins, as a device's allocator aligns it."""


def storage_bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of a tensor's storage, live: uint8, shape [bytes]."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def in_storage(bytes_: Tensor, like: Tensor, begin: int = 0) -> Tensor:
    """Return a tensor with the form of ``like`` in other memory, as far from its begin as ``like`` is from its own.

    ``bytes_``: uint8, of the other memory. ``begin``: of the storage that ``like`` is in, relative to ``bytes_``.
    """
    offset = (bytes_.storage_offset() + begin) // like.element_size() + like.storage_offset()
    made = torch.empty(0, dtype=like.dtype, device=bytes_.device)
    return made.set_(bytes_.untyped_storage(), offset, like.shape, like.stride())


def dense(memory: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with dtype, shape and order of ``like``, without gaps, that begins where ``memory`` does.

    ``memory``: uint8, 1-D.
    """
    return in_storage(memory, torch.empty_like(like, device="meta"))


def fixed(tensor: Tensor) -> Tensor:
    """Return the same memory in a storage that torch refuses to resize, where it is host memory.

    Who frees a tensor by ``untyped_storage().resize_(0)`` and lets it grow again would lose its neighbours' values.
    """
    return from_dlpack(tensor) if type(tensor) is Tensor and tensor.device.type == "cpu" else tensor


def host_copies(sources: Sequence[Tensor], *, pin: bool) -> list[Tensor]:
    """Return copies of flat memory in host memory: uint8, of the sources' lengths. They have arrived.

    All memory is allocated before the first byte is copied. Pageable memory makes each copy wait for the device.

    Args:
        sources: uint8, 1-D.
        pin: pin what a device is to copy.

    Raises:
        UsageError: naming the bytes, if the machine has no such memory. Nothing has been copied.
    """
    copies: dict[int, Tensor] = {}
    for pinned in (False, True):
        chosen = [at for at, source in enumerate(sources) if (pin and source.device.type != "cpu") == pinned]
        copies |= zip(chosen, allocate([sources[at].numel() for at in chosen], pin=pinned), strict=True)
    for at, source in enumerate(sources):
        copies[at].copy_(source, non_blocking=copies[at].is_pinned() if source.device.type != "cpu" else False)
    for device in {source.device for source in sources}:
        if has_streams(device):
            torch.accelerator.current_stream(device).synchronize()
    return [copies[at] for at in range(len(sources))]


def allocate(sizes: Sequence[int], *, pin: bool) -> list[Tensor]:
    """Return uninitialised host memory of these sizes in bytes: large ones alone, the others in slabs.

    Raises UsageError, naming the bytes, if the machine has no such memory.
    """
    made: list[Tensor] = []
    memory, used = torch.empty(0, dtype=torch.uint8, device="cpu"), 0
    try:
        for at, size in enumerate(sizes):
            if size >= SLAB:
                made.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin))
                continue
            if used + size > memory.numel():
                left = sum(rounded_up(one, ALIGNMENT) for one in sizes[at:] if one < SLAB)
                memory, used = torch.empty(min(left, SLAB), dtype=torch.uint8, device="cpu", pin_memory=pin), 0
            made.append(memory[used : used + size])
            used += rounded_up(size, ALIGNMENT)
    except RuntimeError as error:  # torch's OutOfMemoryError is one, and so is a refusal to pin
        kind = "pinned host memory" if pin else "host memory"
        raise UsageError(
            f"{sum(sizes)} bytes of {kind} are needed, and torch could not allocate them ({error}); free host memory"
            + (", raise the limit of locked memory, or pass pin=False" if pin else "")
        ) from error
    return made
