"""A rank's range of one flattened tensor, as torch.distributed.checkpoint can write and read it.

A range of a flattened tensor is a few boxes of the tensor itself. Saved as boxes with the whole tensor's shape, it can
be read back by any number of ranks, sharded or whole, without a gather.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.errors import ArgumentError, UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a range: where it lies in the whole tensor and in the range.

    Attributes:
        offsets, sizes: in the whole tensor, one per dimension, in elements.
        begin, end: in the range, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    end: int


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut [start, stop) of the flattened ``shape`` (row-major) into at most 2 * ndim - 1 boxes, in order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), (), 0, 1)
        return
    row = math.prod(shape[1:])
    # What is there of a row that is cut, whole rows, and what is there of a row that is cut.
    first, last = min(stop, -(-start // row) * row), max(start, stop // row * row)
    for begin, end in pairwise(sorted({start, first, last, stop})):
        index = begin // row
        if begin % row == end % row == 0:
            yield Box((index, *(0 for _ in shape[1:])), ((end - begin) // row, *shape[1:]), begin - start, end - start)
            continue
        for box in boxes_of(shape[1:], begin - index * row, end - index * row):
            there = begin - start
            yield Box((index, *box.offsets), (1, *box.sizes), there + box.begin, there + box.end)


class ParamShard(Tensor):
    """A tensor of which this rank holds the elements [start, start + piece.numel()) in row-major order.

    ``shape`` is the whole tensor's; dtype and device are the piece's. It serves to save and load the piece: any
    operator but ``detach`` raises UsageError.

    Attributes:
        piece: 1-D, live, empty where this rank holds nothing.
        start: where the piece begins in the flattened whole, in elements.

    Raises:
        ArgumentError: for a piece that is not 1-D, or reaches beyond the whole.
    """

    piece: Tensor
    start: int

    @staticmethod
    def __new__(cls, piece: Tensor, shape: Sequence[int], start: int) -> "ParamShard":
        """Wrap ``piece``."""
        size = torch.Size(shape)
        if piece.dim() != 1 or start < 0 or start + piece.numel() > size.numel():
            raise ArgumentError(
                f"a piece of shape {tuple(piece.shape)} from element {start} does not fit a tensor of {tuple(size)}"
            )
        made: ParamShard = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=piece.dtype, device=piece.device, requires_grad=False
        )
        made.piece = piece
        made.start = start
        return made

    def boxes(self) -> list[Box]:
        """Return the boxes that make up the piece, in order."""
        return list(boxes_of(self.shape, self.start, self.start + self.piece.numel()))

    def like(self, dtype: torch.dtype) -> "ParamShard":
        """Return the same range with a new, uninitialised piece of ``dtype``."""
        return ParamShard(torch.empty_like(self.piece, dtype=dtype), self.shape, self.start)

    def __repr__(self) -> str:  # type: ignore[override]
        stop = self.start + self.piece.numel()
        return f"ParamShard({tuple(self.shape)}, {self.dtype}, elements {self.start} to {stop})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Allow ``detach`` alone."""
        if func is torch.ops.aten.detach.default:
            return ParamShard(args[0].piece.detach(), args[0].shape, args[0].start)
        raise UsageError(
            f"{func} on a ParamShard, which is a part of a tensor only; use its piece, or the whole tensor"
        )

    # Hooks of torch.distributed.checkpoint, imported inside as that takes long: its callers have imported it already.

    def __create_write_items__(self, fqn: str, _object: Any) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for index, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes()]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        for box in self.boxes():
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return self.piece[box.begin : box.end].view(box.sizes)
        raise UsageError(f"{index} is not one of the boxes of {self!r}")
