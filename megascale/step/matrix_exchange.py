"""Matrices that are cut over ranks, as FSDP2's are, become whole on one rank each, and pieces again.

Packed messages, one to each other rank: pieces to the owners, results back; of matrices that all ranks have whole, only
results. What is cut over several dimensions of a mesh is joined along one after the other. Owners are chosen longest
first by :mod:`megascale.grad_sync.owners`, from shapes alone.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Cut(NamedTuple):
    """A matrix, or a piece of it, is cut along ``dim`` over dimension ``mesh_dim`` of a mesh, as torch.chunk cuts."""

    dim: int
    mesh_dim: int


def cuts_of(tensor: Tensor) -> list[Cut]:
    """Return the cuts that made a DTensor's pieces, in the order of cutting; none where every rank has all of it.

    Raises:
        ValueError: where it is cut in another way: a partial sum, or pieces that are not those of such cuts.
    """
    if not is_dtensor(tensor):
        return []
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensor.device_mesh
    cuts: list[Cut] = []
    strided: list[tuple[Cut, Any]] = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if type(placement) is Replicate or mesh.size(mesh_dim) == 1:
            continue
        if isinstance(
            placement, _StridedShard
        ):  # cut after the dimensions of the mesh that follow, as by FSDP2 with TP
            strided.insert(0, (Cut(placement.dim % tensor.dim(), mesh_dim), placement.split_factor))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim % tensor.dim(), mesh_dim))
        else:
            raise ValueError(f"placements {tensor.placements}")
    for cut, factor in strided:
        before = [one for one in cuts if one.dim == cut.dim and one.mesh_dim > cut.mesh_dim]
        if factor != math.prod(mesh.size(one.mesh_dim) for one in before):
            raise ValueError(f"placements {tensor.placements}")
        cuts.append(cut)
    if _cut(tensor, cuts) != tensor._local_tensor.shape:
        raise ValueError(f"pieces of shape {tuple(tensor._local_tensor.shape)}")
    return cuts


class Exchange(ABC):
    """Makes each matrix whole on one rank, and gives results to all. All ranks that share matrices call it alike."""

    @abstractmethod
    def collect(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole matrices that this rank owns, from what it has of each matrix."""

    @abstractmethod
    def give_back(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return what this rank shall have of each matrix, from the whole ones that it owns.

        ``like``: any tensor of their dtype and device.
        """


class PackedExchange(Exchange):
    """Gives each matrix an owner in ``group``, by the shapes of the whole matrices."""

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


class WorkSplit(PackedExchange):
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
    """Sends matrices that are cut over the same dimensions of a mesh to their owners, and back.

    Args:
        matrices: DTensors on one mesh, 1 or more.
        cuts: of each, over the same dimensions of the mesh in the same order, see :func:`cuts_of`.
    """

    def __init__(self, matrices: Sequence["DTensor"], cuts: Sequence[Sequence[Cut]]) -> None:
        mesh, held = matrices[0].device_mesh, list(range(len(matrices)))
        self._joints: list[_Joint] = []
        for last in reversed(range(len(cuts[0]))):
            if not held:  # alike on all ranks that the next messages would go to
                break
            joint = _Joint(
                [matrices[index].shape for index in held],
                [_cut(matrices[index], cuts[index][:last]) for index in held],
                [cuts[index][last].dim for index in held],
                mesh.get_group(cuts[0][last].mesh_dim),
            )
            self._joints.append(joint)
            held = [held[place] for place in joint.owned]

    @override
    def collect(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        for joint in self._joints:
            pieces = joint.collect(pieces)
        return list(pieces)

    @override
    def give_back(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        for joint in reversed(self._joints):
            wholes = joint.give_back(wholes, like)
        return list(wholes)


class _Joint(PackedExchange):
    """Joins pieces along the cut of one dimension of a mesh, and cuts results.

    Args:
        shapes: of the whole matrices.
        joined: shapes of what is joined here: whole matrices, or pieces of them.
        dims: along which dimension each is cut over the ranks of ``group``.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], joined: Sequence[torch.Size], dims: Sequence[int], group: ProcessGroup
    ) -> None:
        super().__init__(shapes, group)
        self._dims = list(dims)
        self._shapes = [[_piece(shape, dim, self._ranks, rank) for rank in range(self._ranks)]
                        for shape, dim in zip(joined, dims, strict=True)]  # fmt: skip

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


def _cut(matrix: "DTensor", cuts: Sequence[Cut]) -> torch.Size:
    """Return the shape of this rank's piece after some cuts."""
    shape, mesh = matrix.shape, matrix.device_mesh
    for dim, mesh_dim in cuts:
        shape = _piece(shape, dim, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
    return shape


def _piece(shape: torch.Size, dim: int, ranks: int, rank: int) -> torch.Size:
    """Return the shape of a rank's piece."""
    most = -(-shape[dim] // ranks)
    extent = max(0, min(most, shape[dim] - rank * most))
    return torch.Size([extent if axis == dim else size for axis, size in enumerate(shape)])
