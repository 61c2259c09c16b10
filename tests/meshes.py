"""Process groups and device meshes for functions that run in the pool of ranks: made once, whoever asks.

They live as long as their rank. gloo gives each group a thread that wakes up a hundred times a second: a pool in which
every test made its own would soon do little else. So meshes of the same ranks share their groups, whatever their names.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale import ParallelGroups


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the mesh of this shape, of the default device; several dimensions need names.

    Every rank of the world calls it together.
    """
    ranks, device = torch.arange(math.prod(shape), device="cpu").view(shape), torch.get_default_device().type
    lines = [ranks.movedim(dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(shape)]
    groups = [group_among(parts) for parts in lines]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def group_among(parts: Sequence[Sequence[int]]) -> ProcessGroup:
    """Return the group of the ranks that this rank is among: each is in one of ``parts``. As ``group_of``."""
    groups = [group_of(*ranks) for ranks in parts]
    return next(group for group, ranks in zip(groups, parts, strict=True) if dist.get_rank() in ranks)


@functools.cache
def group_of(*ranks: int) -> ProcessGroup:
    """Return the group of these ranks: WORLD for all of them. Every rank of the world calls it together."""
    world = dist.group.WORLD
    assert world is not None
    return world if list(ranks) == list(range(dist.get_world_size())) else dist.new_group(ranks)


def hybrid_groups() -> ParallelGroups:
    """Return data parallelism of four ranks that shards within halves, which repeat one another."""
    shard, replicate = group_among([(0, 1), (2, 3)]), group_among([(0, 2), (1, 3)])
    return ParallelGroups(dist.group.WORLD, data_shard=shard, data_replicate=replicate)
