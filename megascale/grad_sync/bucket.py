"""A bucket's memory: one flat tensor with a view of it for every parameter inside.

It holds main grads, and the model params that are gathered after a sharded update. Every bucket is its own allocation,
so that moving parameters into flat memory needs the memory of one more bucket, not of all.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from megascale.grad_sync.layout import Bucket, BufferLayout, Piece
from megascale.utils.host_memory import host_copies, storage_bytes
from megascale.utils.streams import WriteOrder


class FlatBucket:
    """The memory of one bucket, zero at first.

    Attributes:
        layout: where each parameter lies.
        bucket: which of the layout's buckets this is.
        placements: where the parameters inside lie, in order.
        flat: shape [bucket.numel], padding included.
        views: by name, contiguous, in the parameter's shape.
        order: orders the streams that write the views; its parts are named as they are.
    """

    def __init__(
        self,
        layout: BufferLayout,
        bucket: Bucket,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.bucket = bucket
        self.placements = bucket.placements
        self.flat = torch.zeros(bucket.numel, dtype=dtype, device=device)
        self.order = WriteOrder(self.flat)
        self._host: Tensor | None = None
        self.views: dict[str, Tensor] = {}
        for placement in self.placements:
            part = self.flat[placement.start - bucket.start : placement.stop - bucket.start]
            self.views[placement.name] = part.view(shapes[placement.name])

    def twin(self, dtype: torch.dtype) -> "FlatBucket":
        """Return new memory of the same layout in another dtype."""
        shapes = {name: view.shape for name, view in self.views.items()}
        return FlatBucket(self.layout, self.bucket, shapes, dtype, self.flat.device)

    def leave(self, *, pin: bool, keep: bool) -> None:
        """Free the memory; all views stay, without memory, until :meth:`come_back`.

        Args:
            pin: see :func:`megascale.utils.host_memory.host_copies`, whose errors it raises.
            keep: copy the values to host memory first. False: they are zeros after the return.
        """
        self.order.join()
        if keep:
            [self._host] = host_copies([storage_bytes(self.flat)], pin=pin)
        self.flat.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Allocate the memory again, for the same views, with the values that it had. Does nothing if it is there.

        Counts as a write to the views: who reads them on a stream of its own meanwhile reads them anew.
        """
        if self.flat.untyped_storage().nbytes() > 0 or self.flat.numel() == 0:
            return
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        if self._host is None:
            self.flat.zero_()
        else:
            self.flat.copy_(self._host.view(self.flat.dtype), non_blocking=self._host.is_pinned())
            self._host = None

    def shard(self, rank: int) -> Tensor:
        """Return the part that ``rank`` owns."""
        start, stop = self.layout.shard(self.bucket, rank)
        return self.flat[start - self.bucket.start : stop - self.bucket.start]

    def uneven_shards(self) -> list[Tensor] | None:
        """Return the parts of all ranks, in order; None where they are equal."""
        if not self.bucket.borders:
            return None
        return [self.shard(rank) for rank in range(self.layout.num_shards)]

    def pieces(self, rank: int) -> dict[str, Piece]:
        """Return the piece of each parameter that ``rank`` owns, by name: at most one, as shards are contiguous."""
        return {piece.name: piece for piece in self.layout.pieces(*self.layout.shard(self.bucket, rank))}

    def part(self, piece: Piece) -> Tensor:
        """Return the memory of a piece, 1-D."""
        start = piece.start - self.bucket.start
        return self.flat[start : start + piece.numel]

    def parts(self, rank: int) -> dict[str, Tensor]:
        """Return the memory of what ``rank`` owns of each parameter, by name: 1-D, empty where it owns nothing.

        Where parameters have owners, those of ``rank`` are whole, in their shapes.
        """
        pieces = self.pieces(rank)
        return {
            placement.name: self.views[placement.name]
            if placement.owner == rank
            else self.part(pieces[placement.name])
            if placement.name in pieces
            else self.flat[:0]
            for placement in self.placements
        }


@lru_cache
def main_grad_dtype(asked: torch.dtype, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a main grad: ``asked`` where it can hold the gradients of a ``param_dtype`` parameter."""
    return asked if torch.promote_types(asked, param_dtype) == asked else param_dtype
