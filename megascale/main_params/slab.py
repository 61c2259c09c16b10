"""Slabs: small tensors of one purpose share memory, side by side in the order in which they are updated.

With a hundred thousand tensors in memory of their own, an update spends half of its time on TLB misses. A slab is as
long as its tensors and at most 64 KiB of fp32: keeping, pickling or copying one tensor keeps little else alive.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.utils.dtensors import is_dtensor
from megascale.utils.host_memory import fixed

SLAB = 1 << 14  # elements, at most
SMALL = 1 << 12  # elements; a larger tensor has memory of its own
ALIGNMENT = 16  # elements; a shorter tensor begins where the one before it ends


class Slabs:
    """Creates tensors for parameters that are set up together. Needed only during the set-up.

    Args:
        likes: one tensor for each parameter, with the shape and device of the tensors to be made, in the order of the
            update.
    """

    def __init__(self, likes: Iterable[Tensor]) -> None:
        self._likes = list(likes)  # held, so that ids stay unique
        self._slabs: dict[tuple[str, torch.dtype, int], Tensor] = {}
        self._slots: dict[int, _Slot] = {}
        self._lengths: list[int] = []
        self._lay_out()

    def zeros(self, like: Tensor, dtype: torch.dtype, purpose: str) -> Tensor:
        """Return zeros of the shape, strides, device and placements of ``like``, in ``dtype``.

        Args:
            like: one of ``likes``; another gets memory of its own.
            purpose: tensors of the same purpose share slabs; one per parameter.
        """
        slot = self._slots.get(id(like))
        if slot is None:
            made = torch.zeros_like(like, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
            return made
        key = (purpose, dtype, slot.slab)
        if key not in self._slabs:
            slab = torch.zeros(self._lengths[slot.slab], dtype=dtype, device=like.device)
            self._slabs[key] = fixed(slab)
        # .data: a version counter of its own, and no view to autograd.
        return self._slabs[key][slot.start : slot.start + like.numel()].view(like.shape).data

    def moved_in(self, tensor: Tensor, like: Tensor, purpose: str) -> Tensor:
        """Return ``tensor``, copied into a slab if ``like`` has a slot there and ``tensor`` has its own memory."""
        if id(like) not in self._slots or tensor.untyped_storage().nbytes() > tensor.nbytes:
            return tensor
        return self.zeros(like, tensor.dtype, purpose).copy_(tensor)

    def _lay_out(self) -> None:
        """Assign a slot to each small tensor: neighbours on one device share a slab until it is full."""
        slab_of: dict[torch.device, int] = {}
        for like in self._likes:
            if is_dtensor(like) or not 0 < like.numel() <= SMALL or not like.is_contiguous():
                continue
            slab = slab_of.get(like.device)
            end = SLAB if slab is None else self._lengths[slab]
            start = end if like.numel() < ALIGNMENT else -(-end // ALIGNMENT) * ALIGNMENT
            if slab is None or start + like.numel() > SLAB:
                slab, start = len(self._lengths), 0
                slab_of[like.device] = slab
                self._lengths.append(0)
            self._slots[id(like)] = _Slot(slab, start)
            self._lengths[slab] = start + like.numel()


class _Slot(NamedTuple):
    slab: int
    start: int
