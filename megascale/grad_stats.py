"""Measure and agree: from local gradients to statistics that every rank shares.

The vector that travels has four numbers: sum of squares, non-finite count, zeros, errors. A gradient held alike by k
ranks adds its sums divided by k, so that a single SUM all-reduce serves replicated, sharded and tensor-parallel
gradients at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megascale.collectives import all_reduce_sum_
from megascale.dtensors import is_dtensor
from megascale.errors import ArgumentError
from megascale.kernels import Backend, TensorList, TensorStats, stats_dtype
from megascale.parallel import ParallelGroups, ranks_of


class Holders:
    """How many ranks of `grad_stats` hold the same gradient element as this rank does.

    Args:
        groups: who shares what.
        sharded: gradients are reduced into shards, which only ``replicate`` ranks repeat.
    """

    def __init__(self, groups: ParallelGroups, *, sharded: bool = False) -> None:
        self._groups = groups
        self._sharded = sharded
        self._stats = ranks_of(groups.grad_stats)
        self._tensor = ranks_of(groups.tensor_parallel)

    def weight(self, param: nn.Parameter) -> float:
        """Return what this rank's sums of ``param`` count: 1 / holders, and 0 for Megatron's ``shared`` copies.

        Raises ArgumentError for a DTensor whose mesh reaches beyond ``grad_stats``: its ranks could not agree. And for
        an expert's parameter without a group.
        """
        data = self._groups.of_param(param)
        if getattr(param, "shared", False):
            return 0.0
        mesh_ranks: frozenset[int] = frozenset()
        holders = 1.0
        if is_dtensor(param):
            mesh = param.device_mesh
            mesh_ranks = frozenset(mesh.mesh.flatten().tolist())
            if len(mesh_ranks) > 1 and not mesh_ranks <= self._stats:
                raise ArgumentError(
                    f"a DTensor over ranks {sorted(mesh_ranks)}, but grad_stats has only {sorted(self._stats)}; "
                    "pass groups whose grad_stats spans the parameter's mesh"
                )
            holders = math.prod(mesh.size(dim) for dim, placed in enumerate(param.placements) if placed.is_replicate())
        holders *= self._replicas(ranks_of(data.replicate if self._sharded else data.holders), mesh_ranks)
        if not getattr(param, "tensor_model_parallel", False):
            holders *= self._replicas(self._tensor, mesh_ranks)
        return 1.0 / holders

    def _replicas(self, group: frozenset[int], mesh_ranks: frozenset[int]) -> float:
        """Return how often ``group`` repeats the parameter. A DTensor's own mesh counts itself: it is one holder."""
        return max(1, len(group & self._stats)) / max(1, len(group & self._stats & mesh_ranks))


@dataclass(frozen=True)
class GradStats:
    """One rank's, or after :func:`agree` all ranks', statistics.

    Attributes:
        vector: shape [4], statistics dtype: sum of squares of the scaled gradients, non-finite elements, zeros (NaN
            where not counted), errors (parameters that overflowed at the last rounding, plus one for a gradient that
            cannot be used).
        non_finite: shape [number of gradients], this rank's non-finite elements of each gradient; None without
            gradients.
    """

    vector: Tensor
    non_finite: Tensor | None

    @property
    def errors(self) -> Tensor:
        """Errors, 0-d."""
        return self.vector[3]


@torch.no_grad()
def measure(
    grads: Sequence[Tensor],
    weights: Tensor,
    errors: Tensor,
    *,
    backend: Backend,
    count_zeros: bool,
    device: torch.device,
) -> GradStats:
    """Measure local gradients in one pass; the result is on ``device``.

    Args:
        grads: local tensors in the dtypes they have, on any devices.
        weights: shape [len(grads)]: what each gradient's sums count, see :class:`Holders`.
        errors: 0-d, this rank's errors.
    """
    exact = stats_dtype(device)
    errors = errors.to(exact)
    if not grads:
        vector = torch.zeros(4, dtype=exact, device=device)
        vector[2] = 0.0 if count_zeros else math.nan
        vector[3] = errors
        return GradStats(vector, None)
    stats = _measure_by_device(grads, backend, count_zeros, device)
    return GradStats(backend.total(stats, weights, errors), stats.non_finite)


def _measure_by_device(
    grads: Sequence[Tensor], backend: Backend, count_zeros: bool, device: torch.device
) -> TensorStats:
    """Measure each device's gradients there and bring the statistics to ``device``, in the order of ``grads``."""
    devices = TensorList.of(grads).devices
    if devices == {device}:
        return backend.measure(grads, count_zeros)
    indices = [[i for i, grad in enumerate(grads) if grad.device == place] for place in devices]
    parts = [backend.measure([grads[i] for i in chosen], count_zeros) for chosen in indices]
    order = torch.tensor([i for chosen in indices for i in chosen], device=device).argsort()

    def gathered(values: list[Tensor]) -> Tensor:
        return torch.cat([value.to(device, stats_dtype(device), non_blocking=True) for value in values])[order]

    zeros = gathered([part.zeros for part in parts if part.zeros is not None]) if count_zeros else None
    return TensorStats(
        gathered([part.sum_squares for part in parts]), gathered([part.non_finite for part in parts]), zeros
    )


@torch.no_grad()
def combined(parts: Sequence[GradStats]) -> GradStats:
    """Return the statistics of several optimizers' gradients as those of one, still of this rank alone."""
    non_finite = [part.non_finite for part in parts if part.non_finite is not None]
    return GradStats(torch.stack([part.vector for part in parts]).sum(0), torch.cat(non_finite) if non_finite else None)


@torch.no_grad()
def agree(stats: GradStats, groups: ParallelGroups) -> GradStats:
    """Sum the vector over ``grad_stats``: the one collective of a step."""
    return GradStats(all_reduce_sum_(stats.vector, groups.grad_stats), stats.non_finite)
