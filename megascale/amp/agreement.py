"""Finds the ranks that take a step's decision together, and all-reduces the decision over them.

An optimizer's ranks are those of the process group that the scaler was given, and those of the meshes of its DTensor
parameters. Parameters determine them, not gradients, so that a rank without gradients takes part.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megascale.parallel import ranks_of
from megascale.utils.collectives import all_reduce_sum_
from megascale.utils.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Squares = dict["DeviceMesh | None", Tensor]
"""By mesh, the sum of squares of the gradients on it, 0-d: this rank's, and after the all-reduce the mesh's. None: of
plain gradients, this rank's own."""


class RankSet(NamedTuple):
    """Ranks that add up numbers together: summing over each of ``groups`` in turn sums over all ``members``."""

    members: frozenset[int]
    groups: tuple[ProcessGroup, ...]

    @classmethod
    def of_mesh(cls, mesh: "DeviceMesh") -> "RankSet":
        """Return the ranks of ``mesh``; none if this rank is not one of them.

        A mesh of several dimensions that is not the whole world has no group: its dimensions' groups sum one after the
        other, so that no group has to be created.
        """
        if mesh.get_coordinate() is None:
            return cls(frozenset(), ())
        groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
        if len(groups) == 1:
            return cls(ranks_of(groups[0]), groups)
        members, world = frozenset(mesh.mesh.flatten().tolist()), dist.group.WORLD
        return cls(members, groups if world is None or members != ranks_of(world) else (world,))

    def total(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of 0-d tensors over all members, in one message."""
        vector = torch.stack([value.to(values[-1].dtype) for value in values])
        for group in self.groups:
            all_reduce_sum_(vector, group)
        return list(vector.unbind())


class Agreement:
    """The ranks that decide together about one optimizer's step.

    If one set of ranks contains all others, one all-reduce suffices. Otherwise each set sums in turn, in the order of
    parameters. Where the sets are slices of one mesh, a flag reaches all ranks of the mesh in that way.

    Args:
        params: the optimizer's parameters, in an order that all ranks share.
        process_group: see :class:`megascale.amp.GradScaler`.

    Attributes:
        meshes: of the parameters, in their order.
        is_alone: whether this rank decides alone.
    """

    def __init__(self, params: Iterable[Tensor], process_group: ProcessGroup | None) -> None:
        odd = [param for param in params if type(param) is not nn.Parameter]
        meshes = dict.fromkeys(param.device_mesh for param in odd if is_dtensor(param))
        self.meshes = {mesh: RankSet.of_mesh(mesh) for mesh in meshes}
        given = [] if process_group is None else [RankSet(ranks_of(process_group), (process_group,))]
        distinct: dict[frozenset[int], RankSet] = {}
        for rank_set in [*given, *self.meshes.values()]:
            if len(rank_set.members) > 1:
                distinct.setdefault(rank_set.members, rank_set)
        self._rank_sets = [one for ranks, one in distinct.items() if not any(ranks < other for other in distinct)]
        self.is_alone = not self._rank_sets

    def agree(self, found_inf: Tensor, squares: Squares | None = None) -> tuple[Tensor, Squares]:
        """Return `found_inf` of all ranks, exactly 0 or 1, and each mesh's sum of squares.

        ``found_inf`` is fp32 and 0-d. ``squares`` has an entry for each of :attr:`meshes`, or is None.
        """
        squares = dict(squares or {})
        waiting = [mesh for mesh in self.meshes if mesh in squares]
        for rank_set in self._rank_sets:
            # The squares of a mesh with the same ranks travel in the same message.
            carried = [mesh for mesh in waiting if self.meshes[mesh].members == rank_set.members]
            found_inf, *sums = rank_set.total([found_inf, *(squares[mesh] for mesh in carried)])
            squares.update(zip(carried, sums, strict=True))
            waiting = [mesh for mesh in waiting if mesh not in carried]
        for mesh in waiting:
            [squares[mesh]] = self.meshes[mesh].total([squares[mesh]])
        # torch's fused optimizers skip where found_inf is 1, not where it is 2.
        return (found_inf > 0).float(), squares
