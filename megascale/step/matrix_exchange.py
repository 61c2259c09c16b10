"""Matrices that are cut over ranks, as FSDP2's are, become whole on one rank each, and pieces again.

Two messages to each other rank, packed: pieces to the owners, results back; of matrices that all ranks have whole, only
results. Owners are chosen longest first by :mod:`megascale.grad_sync.owners`, from shapes alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from megascale.grad_sync.layout import ParamSize
from megascale.grad_sync.owners import OwnerLoads, update_cost
from megascale.utils.collectives import all_to_all, group_rank, group_size
from megascale.utils.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def cut_dims(tensor: Tensor) -> tuple[int, int] | None:
    """Return along which dimension a matrix is cut, and over which dimension of its mesh; None: every rank has it all.

    Raises:
        ValueError: where it is cut in another way: over several dimensions of the mesh, in strides, or a partial sum.
    """
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor import Replicate, Shard

    cuts = [
        (placement, mesh_dim)
        for mesh_dim, placement in enumerate(tensor.placements)
        if not (type(placement) is Replicate or tensor.device_mesh.size(mesh_dim) == 1)
    ]
    if not cuts:
        return None
    [(placement, mesh_dim), *others] = cuts
    if others or type(placement) is not Shard:
        raise ValueError(f"placements {tensor.placements}")
    return placement.dim % tensor.dim(), mesh_dim


class Exchange(ABC):
    """Gives each matrix an owner in ``group``, and results to all. All ranks of the group call it alike."""

    def __init__(self, shapes: Sequence[torch.Size], group: ProcessGroup) -> None:
        self._group = group
        self._rank, self._ranks = group_rank(group), group_size(group)
        sizes = [ParamSize(str(index), shape.numel(), cost=update_cost(shape)) for index, shape in enumerate(shapes)]
        owners = OwnerLoads(self._ranks).assign([sizes])
        self._owned: list[list[int]] = [[] for _ in range(self._ranks)]
        for index in range(len(shapes)):
            self._owned[owners[str(index)]].append(index)

    @property
    def owned(self) -> list[int]:
        """Which matrices are whole here."""
        return self._owned[self._rank]

    @abstractmethod
    def collect(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole matrices of :attr:`owned`, from what this rank has of each matrix."""

    @abstractmethod
    def give_back(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return what this rank shall have of each matrix, from the whole ones of :attr:`owned`.

        ``like``: any tensor of their dtype and device.
        """

    def _send(self, outgoing: list[list[Tensor]], incoming: list[list[torch.Size]], like: Tensor) -> list[list[Tensor]]:
        """Send tensors to each rank, in one message each; return what arrives of each, in shapes ``incoming``."""
        flat = [tensor.reshape(-1) for tensors in outgoing for tensor in tensors]
        message = torch.cat(flat) if flat else like.new_empty(0)
        counts = [[shape.numel() for shape in shapes] for shapes in incoming]
        sent = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
        arrived = all_to_all(message, sent, [sum(count) for count in counts], self._group)
        parts = iter(arrived.split([one for count in counts for one in count]))
        return [[next(parts).view(shape) for shape in shapes] for shapes in incoming]

    def _in_order(self, arrived: list[list[Tensor]]) -> list[Tensor]:
        """Return what has come of each owner in the order of the matrices."""
        found: dict[int, Tensor] = {}
        for rank in range(self._ranks):
            found |= zip(self._owned[rank], arrived[rank], strict=True)
        return [found[index] for index in range(len(found))]


class WorkSplit(Exchange):
    """Splits the work on matrices that every rank has whole: results travel, in one message to each other rank."""

    def __init__(self, shapes: Sequence[torch.Size], group: ProcessGroup) -> None:
        super().__init__(shapes, group)
        self._shapes = list(shapes)

    @override
    def collect(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [pieces[index] for index in self.owned]

    @override
    def give_back(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        incoming = [[self._shapes[index] for index in owned] for owned in self._owned]
        return self._in_order(self._send([list(wholes)] * self._ranks, incoming, like))


class MatrixExchange(Exchange):
    """Sends matrices that are cut over the same ranks to their owners, and back.

    Args:
        matrices: DTensors, each cut over the ranks of ``group`` as :func:`torch.chunk` does.
        dims: along which dimension each is cut.
    """

    def __init__(self, matrices: Sequence["DTensor"], dims: Sequence[int], group: ProcessGroup) -> None:
        super().__init__([matrix.shape for matrix in matrices], group)
        self._dims = list(dims)
        self._shapes = [[_piece(matrix.shape, dim, self._ranks, rank) for rank in range(self._ranks)]
                        for matrix, dim in zip(matrices, dims, strict=True)]  # fmt: skip

    @override
    def collect(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        outgoing = [[pieces[index] for index in self._owned[rank]] for rank in range(self._ranks)]
        incoming = [[self._shapes[index][rank] for index in self.owned] for rank in range(self._ranks)]
        arrived = self._send(outgoing, incoming, pieces[0])
        return [
            torch.cat([arrived[rank][place] for rank in range(self._ranks)], dim=self._dims[index])
            for place, index in enumerate(self.owned)
        ]

    @override
    def give_back(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        cut = [
            whole.split([shape[self._dims[index]] for shape in self._shapes[index]], dim=self._dims[index])
            for index, whole in zip(self.owned, wholes, strict=True)
        ]
        outgoing = [[parts[rank] for parts in cut] for rank in range(self._ranks)]
        incoming = [[self._shapes[index][self._rank] for index in self._owned[rank]] for rank in range(self._ranks)]
        return self._in_order(self._send(outgoing, incoming, like))


def _piece(shape: torch.Size, dim: int, ranks: int, rank: int) -> torch.Size:
    """Return the shape of a rank's piece."""
    most = -(-shape[dim] // ranks)
    extent = max(0, min(most, shape[dim] - rank * most))
    return torch.Size([extent if axis == dim else size for axis, size in enumerate(shape)])
