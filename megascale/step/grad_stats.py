"""Measure and agree: from local gradients to statistics that every rank shares.

The numbers of the vector that travels are named in :class:`megascale.kernels.Statistic`. A gradient held alike by k
ranks adds its sums divided by k, so that a single SUM all-reduce serves replicated, sharded and tensor-parallel
gradients at once. The same all-reduce compares those k ranks: each multiplies its sum of squares by its own
coefficient, and the coefficients add up to 0.
"""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale.errors import ArgumentError
from megascale.kernels import Backend, TensorList, TensorStats
from megascale.parallel import ParallelGroups, ranks_of
from megascale.utils.dtensors import is_dtensor


@functools.cache
def contrast_coefficients(num_ranks: int) -> tuple[float, ...]:
    """Return one coefficient for each of ``num_ranks`` replicas: they add up to 0, the largest is 1 or -1.

    They are drawn at random with a fixed seed, so that no subset of the ranks adds up to 0: a difference between nodes
    shows even where the ranks of each node agree.
    """
    generator = random.Random(0)
    drawn = [generator.random() for _ in range(num_ranks)]
    mean = math.fsum(drawn) / num_ranks
    largest = max(abs(one - mean) for one in drawn)
    return tuple((one - mean) / largest if largest else 0.0 for one in drawn)


@dataclass(frozen=True)
class GradWeight:
    """The weights of a gradient's statistics on this rank; see :class:`megascale.kernels.GradWeights`.

    Attributes:
        share: of its squares and zeros.
        contrast: compares all ranks that hold the gradient.
        tensor_contrast: compares tensor-parallel ranks only: sums over a data-parallel group's shards cancel, too.
    """

    share: float
    contrast: float
    tensor_contrast: float


class Holders:
    """How many ranks of `grad_stats` hold the same gradient element as this rank does.

    Args:
        groups: who shares what.
        sharded: gradients are reduced into shards, which only the ``replicate`` ranks hold alike.
    """

    def __init__(self, groups: ParallelGroups, *, sharded: bool = False) -> None:
        self._groups = groups
        self._sharded = sharded
        self._stats = ranks_of(groups.grad_stats)

    def of(self, param: nn.Parameter) -> GradWeight:
        """Return the weight of this rank's sums of ``param``: 1 / holders, and 0 for Megatron's ``shared`` copies.

        Compared are the ranks that reduce the gradient, those on which a DTensor is replicated, and tensor-parallel
        ranks that hold the whole parameter. The last may compute the gradient with additions in another order:
        REPLICA_TOLERANCE allows for that.

        Raises ArgumentError for a DTensor whose mesh reaches beyond ``grad_stats``, as its ranks could not agree, and
        for an expert's parameter without a group.
        """
        data = self._groups.of_param(param)
        # Another stage of the pipeline has the same parameter, and counts its gradient.
        if getattr(param, "shared", False):
            return GradWeight(0.0, 0.0, 0.0)
        mesh_ranks: frozenset[int] = frozenset()
        num_replicas, index = 1, 0  # ranks that hold the same gradient and are compared, and which of them this one is
        if is_dtensor(param):
            mesh = param.device_mesh
            mesh_ranks = frozenset(mesh.mesh.flatten().tolist())
            if len(mesh_ranks) > 1 and not mesh_ranks <= self._stats:
                raise ArgumentError(
                    f"a DTensor over ranks {sorted(mesh_ranks)}, but grad_stats has only {sorted(self._stats)}; "
                    "pass groups whose grad_stats spans the parameter's mesh"
                )
            for dim, placed in enumerate(param.placements):
                if placed.is_replicate():
                    size, place = mesh.size(dim), (mesh.get_coordinate() or [0] * mesh.ndim)[dim]
                    num_replicas, index = num_replicas * size, index * size + place
        # Data-parallel ranks that the mesh does not span hold the same, too: of a plain parameter all of them. Where it
        # spans them, as in FSDP2, placements have said already which hold the same.
        holders = ranks_of(data.replicate if self._sharded else data.holders) & self._stats
        copies = self._num_copies(holders, mesh_ranks)
        if len(holders & mesh_ranks) <= 1 < len(holders):
            size, place = len(holders), sorted(holders).index(dist.get_rank())
            num_replicas, index, copies = num_replicas * size, index * size + place, 1.0
        # Likewise of tensor-parallel ranks, which have a contrast of their own beside this one, see GradWeight.
        tensor = self._tensor_copies(param)
        size, place = 1, 0
        if len(tensor & mesh_ranks) <= 1 < len(tensor):
            size, place = len(tensor), sorted(tensor).index(dist.get_rank())
        else:
            copies *= self._num_copies(tensor, mesh_ranks)
        num_replicas, index = num_replicas * size, index * size + place
        share = 1.0 / (num_replicas * copies)
        contrast, tensor_contrast = contrast_coefficients(num_replicas)[index], contrast_coefficients(size)[place]
        return GradWeight(share, share * contrast, share * tensor_contrast)

    def replica_sets(self, param: nn.Parameter) -> dict[str, frozenset[int]]:
        """Return the ranks that hold the gradient as this rank does, by what they are called."""
        if getattr(param, "shared", False):
            return {}
        data = self._groups.of_param(param)
        data_ranks = ranks_of(data.replicate if self._sharded else data.holders) & self._stats
        sets = {"data-parallel": data_ranks, "tensor-parallel": self._tensor_copies(param)}
        return {kind: ranks for kind, ranks in sets.items() if len(ranks) > 1}

    def _tensor_copies(self, param: nn.Parameter) -> frozenset[int]:
        """Return the tensor-parallel ranks that hold the parameter, or their mesh's part of it, alike."""
        if getattr(param, "tensor_model_parallel", False):
            return frozenset()
        return ranks_of(self._groups.tensor_of_param(param)) & self._stats

    def _num_copies(self, group: frozenset[int], mesh_ranks: frozenset[int]) -> float:
        """Return the number of copies of the parameter in ``group``; a DTensor's own mesh holds one copy in all."""
        return max(1, len(group)) / max(1, len(group & mesh_ranks))


@dataclass(frozen=True)
class GradStats:
    """One rank's statistics, or those that all ranks agreed on.

    Attributes:
        vector: shape [NUM_STATISTICS], fp64, indexed by :class:`megascale.kernels.Statistic`.
        non_finite: shape [number of gradients], this rank's non-finite elements of each gradient; None without
            gradients.
        sum_squares: of each optimizer, shape [number of its gradients], this rank's sums of squares; None without
            gradients.
    """

    vector: Tensor
    non_finite: Tensor | None
    sum_squares: tuple[Tensor | None, ...]


def measured_by_device(grads: TensorList, backend: Backend, count_zeros: bool, device: torch.device) -> TensorStats:
    """Measure each device's gradients there and bring the statistics to ``device``, in the order of ``grads``."""
    places = [tensor.device for tensor in grads.filled]  # of a missing gradient, its parameter's
    parts = {}
    for place in grads.forms.devices:
        theirs = TensorList(
            [grad for grad, other in zip(grads, places, strict=True) if other == place],
            filled=[tensor for tensor in grads.filled if tensor.device == place],
        )
        nothing = torch.zeros(len(theirs), dtype=torch.float64, device=place)
        parts[place] = backend.measure(theirs, count_zeros) if theirs.num_there else TensorStats(*[nothing] * 3)
    runs = [(place, len(list(run))) for place, run in groupby(places)]

    def gathered(name: str) -> Tensor:
        waits = device.type == "cpu"  # for what the host reads next
        left = {
            place: getattr(part, name).to(device, torch.float64, non_blocking=not waits)
            for place, part in parts.items()
        }
        pieces = []
        for place, count in runs:
            pieces.append(left[place][:count])
            left[place] = left[place][count:]
        return torch.cat(pieces)

    return TensorStats(gathered("sum_squares"), gathered("non_finite"), gathered("zeros") if count_zeros else None)


def combined(parts: Sequence[GradStats]) -> GradStats:
    """Return the statistics of several optimizers' gradients as those of one, still of this rank alone."""
    non_finite = [part.non_finite for part in parts if part.non_finite is not None]
    return GradStats(
        torch.stack([part.vector for part in parts]).sum(0),
        torch.cat(non_finite) if non_finite else None,
        tuple(squares for part in parts for squares in part.sum_squares),
    )
