"""Brings each matrix whole to one rank, its owner, and the owner's result back to all ranks.

Muon needs whole matrices, and FSDP2 and tensor parallelism cut them. Every rank sends its pieces to their owners,
packed into one message for each other rank; results return in the same way. A matrix that is cut over several
dimensions of a mesh is joined along one of them after the other. Owners are chosen by
:mod:`megascale.grad_sync.owners` from shapes alone, so all ranks choose the same ones.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megascale.grad_sync.layout import ParamSize
from megascale.grad_sync.owners import assign_owners, update_cost
from megascale.utils.collectives import all_to_all, group_rank, group_size
from megascale.utils.dtensors import held, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Cut(NamedTuple):
    """A cut along dimension ``dim`` of a matrix, one piece for each rank of dimension ``mesh_dim`` of a mesh.

    Pieces have the sizes of torch.chunk's; ranks that this leaves nothing for have empty ones.
    """

    dim: int
    mesh_dim: int


def cuts_of(tensor: Tensor) -> list[Cut] | None:
    """Return the cuts that made a DTensor's pieces, in the order of cutting. Empty where every rank has the whole.

    None where no such cuts made it: it is a partial sum, or its pieces have other sizes.
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
        # Cut after the mesh dimensions that follow it, as FSDP2 cuts what tensor parallelism has cut before.
        if isinstance(placement, _StridedShard):
            strided.insert(0, (Cut(placement.dim % tensor.dim(), mesh_dim), placement.split_factor))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim % tensor.dim(), mesh_dim))
        else:
            return None
    for cut, factor in strided:
        before = [one for one in cuts if one.dim == cut.dim and one.mesh_dim > cut.mesh_dim]
        if factor != math.prod(mesh.size(one.mesh_dim) for one in before):
            return None
        cuts.append(cut)
    return cuts if _own_shape(tensor, cuts) == held(tensor).shape else None


class MatrixExchange:
    """Gives each matrix an owner, and each rank its piece of the owners' results.

    The matrices are DTensors that are cut over the same dimensions of a mesh. All ranks that share them call both
    methods, in this order.

    Args:
        matrices: one or more, all on one mesh.
        cuts: of each matrix, see :func:`cuts_of`; all over the same dimensions of the mesh, in the same order.
    """

    def __init__(self, matrices: Sequence["DTensor"], cuts: Sequence[Sequence[Cut]]) -> None:
        mesh, held = matrices[0].device_mesh, list(range(len(matrices)))
        self._joins: list[_Join] = []
        for last in reversed(range(len(cuts[0]))):
            if not held:  # the ranks of the next group hold the same matrices: none of them would send anything
                break
            join = _Join(
                [matrices[index].shape for index in held],
                [_own_shape(matrices[index], cuts[index][:last]) for index in held],
                [cuts[index][last].dim for index in held],
                mesh.get_group(cuts[0][last].mesh_dim),
            )
            self._joins.append(join)
            held = [held[index] for index in join.owned]

    def collect(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Send this rank's piece of each matrix to the owners. Returns the whole matrices that this rank owns."""
        for join in self._joins:
            pieces = join.collect(pieces)
        return list(pieces)

    def give_back(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Send the results for the matrices that this rank owns. Returns its piece of the result for each matrix.

        ``like``: any tensor of the results' dtype and device, as a rank may own none.
        """
        for join in reversed(self._joins):
            wholes = join.give_back(wholes, like)
        return list(wholes)


class _Join:
    """Joins pieces that one dimension of a mesh has cut, and cuts results in the same way. Messages are packed.

    Args:
        shapes: of the whole matrices; owners are chosen by them.
        joined: shapes after this join: those of the whole matrices, or of pieces that another join completes.
        dims: for each matrix, the dimension along which the ranks of ``group`` have pieces.
        group: the ranks of that dimension of the mesh.

    Attributes:
        owned: indices of the matrices that this rank owns.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], joined: Sequence[torch.Size], dims: Sequence[int], group: ProcessGroup
    ) -> None:
        self._group = group
        self._rank, self._ranks = group_rank(group), group_size(group)
        sizes = [ParamSize(str(index), shape.numel(), cost=update_cost(shape)) for index, shape in enumerate(shapes)]
        owners = assign_owners([sizes], [(0, 0, rank) for rank in range(self._ranks)])
        self._owned: list[list[int]] = [[] for _ in range(self._ranks)]
        for index in range(len(shapes)):
            self._owned[owners[str(index)]].append(index)
        self.owned = self._owned[self._rank]
        self._dims = list(dims)
        self._shapes = [[_piece_shape(shape, dim, self._ranks, rank) for rank in range(self._ranks)]
                        for shape, dim in zip(joined, dims, strict=True)]  # fmt: skip

    def collect(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Send this rank's pieces to the owners. Returns the joined matrices that this rank owns."""
        outgoing = [[pieces[index] for index in self._owned[rank]] for rank in range(self._ranks)]
        incoming = [[self._shapes[index][rank] for index in self.owned] for rank in range(self._ranks)]
        arrived = self._send(outgoing, incoming, pieces[0])
        return [
            torch.cat([arrived[rank][position] for rank in range(self._ranks)], dim=self._dims[index])
            for position, index in enumerate(self.owned)
        ]

    def give_back(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Send the pieces of each result that this rank owns. Returns its pieces, in the order of the matrices."""
        cut = [
            whole.split([shape[self._dims[index]] for shape in self._shapes[index]], dim=self._dims[index])
            for index, whole in zip(self.owned, wholes, strict=True)
        ]
        outgoing = [[parts[rank] for parts in cut] for rank in range(self._ranks)]
        incoming = [[self._shapes[index][self._rank] for index in self._owned[rank]] for rank in range(self._ranks)]
        by_index: dict[int, Tensor] = {}
        for owned, arrived in zip(self._owned, self._send(outgoing, incoming, like), strict=True):
            by_index |= zip(owned, arrived, strict=True)
        return [by_index[index] for index in range(len(by_index))]

    def _send(self, outgoing: list[list[Tensor]], incoming: list[list[torch.Size]], like: Tensor) -> list[list[Tensor]]:
        """Send each rank its list of tensors, as one message. Returns each rank's list, in the shapes ``incoming``."""
        flat = [tensor.reshape(-1) for tensors in outgoing for tensor in tensors]
        message = torch.cat(flat) if flat else like.new_empty(0)
        counts = [[shape.numel() for shape in shapes] for shapes in incoming]
        sent = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
        arrived = all_to_all(message, sent, [sum(count) for count in counts], self._group)
        parts = iter(arrived.split([one for count in counts for one in count]))
        return [[next(parts).view(shape) for shape in shapes] for shapes in incoming]


def _own_shape(matrix: "DTensor", cuts: Sequence[Cut]) -> torch.Size:
    """Return the shape of this rank's piece of a matrix after ``cuts``."""
    shape, mesh = matrix.shape, matrix.device_mesh
    for dim, mesh_dim in cuts:
        shape = _piece_shape(shape, dim, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
    return shape


def _piece_shape(shape: torch.Size, dim: int, ranks: int, rank: int) -> torch.Size:
    """Return the shape of one rank's piece of what is cut along ``dim`` over ``ranks`` ranks."""
    most = -(-shape[dim] // ranks)
    extent = max(0, min(most, shape[dim] - rank * most))
    return torch.Size([extent if axis == dim else size for axis, size in enumerate(shape)])
