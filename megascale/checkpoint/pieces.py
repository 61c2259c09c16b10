"""The pieces that a rank writes, and the host memory that a background save copies them to.

A tensor that every rank holds whole is one piece, and the first rank writes it. Of a DTensor or a ParamShard each rank
has boxes, as they tell torch.distributed.checkpoint; of a box that several ranks hold the first of them writes it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from megascale.main_params.shard import ParamShard

RANK_PART = "rank"
"""The first part of the keys of what one rank alone has, its own state."""

LARGE_BYTES = 1 << 16
"""From here torch copies by all of its threads, and waits for the slowest of them with each copy; we by one."""
NEAR = 1 << 12
"""Bytes between two tensors of one storage up to which they are copied together."""


Place: TypeAlias = tuple[str, tuple[int, ...], bool]
"""Where a piece lies: its tensor's key, its offsets there, one per dimension, and whether it is the whole tensor."""


def pieces_of(tensors: Mapping[str, Tensor], rank: int) -> dict[Place, Tensor]:
    """Return what ``rank`` could write of its ``tensors``, live, by place."""
    pieces: dict[Place, Tensor] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, (DTensor, ParamShard)):
            for chunk in tensor.__create_chunk_list__():
                data = tensor.__get_tensor_shard__(MetadataIndex(key, chunk.offsets))
                pieces[key, tuple(chunk.offsets), chunk.sizes == tensor.shape] = data.detach()
        elif rank == 0 or key.startswith(f"{RANK_PART}/"):
            pieces[key, (0,) * tensor.dim(), True] = tensor
    return pieces


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a row-major tensor on the host, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())
    # A dimension of one element has any stride, which view(dtype) refuses.
    data: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(data)


def on_host(tensor: Tensor) -> memoryview:
    """Return the bytes of any tensor, row-major, on the host: its own, where it is so already."""
    return bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())


class HostMemory:
    """Host memory for the copies of one rank, kept from one save to the next: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, memoryview]] = []

    @torch.no_grad()
    def copied(self, live: Sequence[Tensor]) -> list[memoryview]:
        """Return copies of the tensors' bytes, as :func:`on_host` does, valid until the next call.

        Pinned where a device copies to them. What lies side by side in a storage, as main params and state do, is one
        copy: a tensor of a few elements would take longer to be asked for than to be copied.
        """
        found = [memoryview(b"")] * len(live)
        places: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for index, tensor in enumerate(live):
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                found[index] = on_host(tensor)  # which makes a copy of such a tensor
            elif nbytes := tensor.nbytes:
                storage = tensor.get_device(), tensor.untyped_storage().data_ptr()
                start = int(tensor.storage_offset()) * tensor.element_size()
                places.setdefault(storage, []).append((start, start + nbytes, index))
        runs: list[list[tuple[int, int, int]]] = []
        for in_storage in places.values():
            last = -1
            for place in sorted(in_storage):
                if last < 0 or place[0] > last + NEAR:
                    runs.append([])
                runs[-1].append(place)
                last = max(last, place[1])
        copies = self._copies[: len(runs)] + [(torch.empty(0), memoryview(b""))] * (len(runs) - len(self._copies))
        for number, run in enumerate(runs):
            begin, end, index = run[0]
            source = live[index]
            if len(run) > 1:
                end = max(place[1] for place in run)
                source = torch.empty(0, dtype=torch.uint8, device=source.device).set_(
                    source.untyped_storage(), begin, (end - begin,), (1,)
                )
            copy, data = copies[number]
            if copy.shape != source.shape or copy.dtype != source.dtype:
                copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=not source.is_cpu)
                data = bytes_of(copy)
                copies[number] = copy, data
            if source.is_cpu and end - begin > LARGE_BYTES:
                data[:] = bytes_of(source)
            else:
                copy.copy_(source, non_blocking=True)
            for start, stop, index in run:
                found[index] = data[start - begin : stop - begin]
        self._copies = copies
        for device in {tensor.device for tensor in live if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()
        return found
