"""Finds the ranks that take a step's decision together, and all-reduces the decision over them.

An optimizer's ranks are those of the process group that the scaler was given, and those of the meshes of its DTensor
parameters. Parameters determine them, not gradients, so that a rank without gradients takes part.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megascale.parallel import ranks_of
from megascale.utils.collectives import all_reduce_sum_
from megascale.utils.dtensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Squares = dict["DeviceMesh", Tensor]
"""By mesh, the sum of squares of the gradients on it, 0-d: this rank's, and after the all-reduce the mesh's."""


@dataclass(frozen=True)
class RankSet:
    """Ranks that add up numbers together: summing over each of ``groups`` in turn sums over all ``members``."""

    members: frozenset[int]
    groups: tuple[ProcessGroup, ...]

    @classmethod
    def of_group(cls, group: ProcessGroup | None) -> "RankSet":
        """Return the ranks of ``group``; None: this rank alone."""
        return cls(ranks_of(group), () if group is None else (group,))

    @classmethod
    def of_mesh(cls, mesh: "DeviceMesh") -> "RankSet":
        """Return the ranks of ``mesh``; none if this rank is not one of them.

        A mesh of several dimensions that is not the whole world has no group: its dimensions' groups sum one after the
        other, so that no group has to be created.
        """
        if mesh.get_coordinate() is None:
            return cls(frozenset(), ())
        if mesh.ndim == 1:
            return cls.of_group(mesh.get_group())
        members = frozenset(mesh.mesh.flatten().tolist())
        if members == ranks_of(dist.group.WORLD):
            return cls.of_group(dist.group.WORLD)
        return cls(members, tuple(mesh.get_group(dim) for dim in range(mesh.ndim)))

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
    """

    def __init__(self, params: Iterable[Tensor], process_group: ProcessGroup | None) -> None:
        odd = [param for param in params if type(param) is not nn.Parameter]
        meshes = dict.fromkeys(param.device_mesh for param in odd if is_dtensor(param))
        self._of_mesh = {mesh: RankSet.of_mesh(mesh) for mesh in meshes}
        distinct: dict[frozenset[int], RankSet] = {}
        for rank_set in [RankSet.of_group(process_group), *self._of_mesh.values()]:
            if len(rank_set.members) > 1:
                distinct.setdefault(rank_set.members, rank_set)
        self._rank_sets = [one for ranks, one in distinct.items() if not any(ranks < other for other in distinct)]

    @property
    def is_alone(self) -> bool:
        """Whether this rank decides alone."""
        return not self._rank_sets

    @property
    def meshes(self) -> "list[DeviceMesh]":
        """The meshes of the parameters, in their order."""
        return list(self._of_mesh)

    def agree(self, found_inf: Tensor, squares: Squares | None = None) -> tuple[Tensor, Squares]:
        """Return `found_inf` of all ranks, exactly 0 or 1, and each mesh's sum of squares.

        ``found_inf`` is fp32 and 0-d. ``squares`` has an entry for each of :attr:`meshes`, or is None.
        """
        squares = dict(squares or {})
        waiting = dict(squares)
        for rank_set in self._rank_sets:
            # The squares of a mesh with the same ranks travel in the same message.
            carried = [mesh for mesh in waiting if self._of_mesh[mesh].members == rank_set.members]
            found_inf, *sums = rank_set.total([found_inf, *(waiting.pop(mesh) for mesh in carried)])
            squares.update(zip(carried, sums, strict=True))
        for mesh, mine in waiting.items():
            [squares[mesh]] = self._of_mesh[mesh].total([mine])
        # torch's fused optimizers skip where found_inf is 1, not where it is 2.
        return (found_inf > 0).float(), squares
