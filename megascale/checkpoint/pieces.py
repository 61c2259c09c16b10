"""The pieces that a rank writes, and the host memory that a background save copies them to.

A tensor that every rank holds whole is one piece, and the first rank writes it. Of a DTensor or a ParamShard each rank
has boxes, as they tell torch.distributed.checkpoint; of a box that several ranks hold the first of them writes it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from megascale.main_params.shard import ParamShard

RANK_PART = "rank"
"""The first part of the keys of what one rank alone has, its own state."""

LARGE_NUMEL = 1 << 15
"""From here torch copies by all of its threads, and waits for the slowest of them with each tensor; we by one."""


class Place(NamedTuple):
    """Where a piece lies: the key of its tensor, and its offsets there, one per dimension, in elements.

    ``is_whole``: it is all of the tensor.
    """

    key: str
    offsets: tuple[int, ...]
    is_whole: bool


def pieces_of(tensors: Mapping[str, Tensor], rank: int) -> dict[Place, Tensor]:
    """Return what ``rank`` could write of its ``tensors``, live, by place."""
    pieces: dict[Place, Tensor] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, (DTensor, ParamShard)):
            for chunk in tensor.__create_chunk_list__():
                data = tensor.__get_tensor_shard__(MetadataIndex(key, chunk.offsets))
                pieces[Place(key, tuple(chunk.offsets), chunk.sizes == tensor.shape)] = data.detach()
        elif rank == 0 or key.startswith(f"{RANK_PART}/"):
            pieces[Place(key, (0,) * tensor.dim(), True)] = tensor
    return pieces


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a row-major tensor on the host, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


class HostMemory:
    """Host memory for the copies of one rank, kept from one save to the next: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    @torch.no_grad()
    def copied(self, live: Sequence[Tensor]) -> list[Tensor]:
        """Return copies, valid until the next call: row-major, on the host, pinned where a device copies to it."""
        there = self._tensors[: len(live)] + [torch.empty(0)] * (len(live) - len(self._tensors))
        for index, (copy, tensor) in enumerate(zip(there, live, strict=True)):
            if copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                pin = not tensor.is_cpu
                there[index] = copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
            is_plain = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
            if is_plain and tensor.numel() > LARGE_NUMEL:
                bytes_of(copy)[:] = bytes_of(tensor)
            else:
                copy.copy_(tensor, non_blocking=True)
        self._tensors = there
        for device in {tensor.device for tensor in live if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()
        return list(there)
