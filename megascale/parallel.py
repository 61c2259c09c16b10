"""Which ranks share what: the process groups of a step, resolved once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale.errors import ArgumentError, ArgumentTypeError
from megascale.utils import validate
from megascale.utils.collectives import group_size, is_initialized

DATA_PARALLEL_NAMES = (
    "dp",
    "dp_replicate",
    "dp_shard",
    "data_parallel",
    "replicate",
    "shard",
    "fsdp",
    "ddp",
    "cp",
    "dp_cp",
)
REPLICATE_NAMES = ("dp_replicate", "replicate", "ddp")
TENSOR_PARALLEL_NAMES = ("tp", "tensor_parallel", "tensor")


class _Unset:
    """Marks a field that was not given, which is not the same as None."""

    def __repr__(self) -> str:
        return "unset"


UNSET: Any = _Unset()


@dataclass(frozen=True)
class GradGroup:
    """The ranks that hold one parameter and reduce its gradient together.

    Attributes:
        holders: all of them.
        shard: those over which DistributedOptimizer cuts gradient, main param and state.
        replicate: those that hold the same shard as this rank; ``shard`` times ``replicate`` is ``holders``.
    """

    holders: ProcessGroup | None
    shard: ProcessGroup | None
    replicate: ProcessGroup | None


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that one step needs. None in a field means this rank alone.

    Attributes:
        data_parallel: ranks that hold the same parameters and average their gradients.
        grad_stats: ranks that agree on `found_inf`, the norm and the zero count. Not given: ``data_parallel``, or
            ``tensor_parallel`` where only that is given. With both, or with an expert group, name the group that spans
            all, or use :meth:`from_mesh`.
        tensor_parallel: ranks that split single parameters. Needed for parameters that carry Megatron's
            ``tensor_model_parallel`` attribute; DTensors bring their own mesh.
        data_shard: the part of ``data_parallel`` over which DistributedOptimizer shards, such as the ranks of a node.
            Not given: all of it.
        data_replicate: the ranks of ``data_parallel`` with the same shard as this one (hybrid sharding). Each shard's
            gradient is summed over them too.
        expert_data_parallel: ranks that hold the same experts: parameters with Megatron's attribute
            ``allreduce = False``. Their gradients are reduced and sharded over it, and divided by the size of
            ``data_parallel``, because tokens reach them from all of its ranks.
        expert_tensor_parallel: ranks that split, or repeat, single experts' parameters. Not given: ``tensor_parallel``.
    """

    data_parallel: ProcessGroup | None = None
    grad_stats: ProcessGroup | None = UNSET
    tensor_parallel: ProcessGroup | None = None
    data_shard: ProcessGroup | None = UNSET
    data_replicate: ProcessGroup | None = None
    expert_data_parallel: ProcessGroup | None = UNSET
    expert_tensor_parallel: ProcessGroup | None = UNSET

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not UNSET:
                validate.process_group(field.name, value)
        shard, replicate, holders = self.data_shard, self.data_replicate, self.data_parallel
        if self.grad_stats is UNSET:
            if group_size(holders) > 1 and group_size(self.tensor_parallel) > 1:
                raise ArgumentError(
                    "grad_stats is not given, and data_parallel and tensor_parallel are both larger than one rank; "
                    "pass the group that spans both (often torch.distributed.group.WORLD), or use "
                    "ParallelGroups.from_mesh"
                )
            only = holders if group_size(self.tensor_parallel) == 1 else self.tensor_parallel
            object.__setattr__(self, "grad_stats", only)
        if shard is UNSET:
            if group_size(replicate) > 1:
                raise ArgumentError(
                    "data_replicate is given without data_shard; name the ranks of data_parallel that share one copy"
                )
            shard = holders
            object.__setattr__(self, "data_shard", shard)
        if group_size(shard) * group_size(replicate) != group_size(holders) or not (
            ranks_of(shard) | ranks_of(replicate) <= ranks_of(holders)
        ):
            raise ArgumentError(
                f"data_shard ({group_size(shard)} ranks) and data_replicate ({group_size(replicate)} ranks) must "
                f"together make up data_parallel ({group_size(holders)} ranks)"
            )
        if self.expert_tensor_parallel is UNSET:
            object.__setattr__(self, "expert_tensor_parallel", self.tensor_parallel)

    def of_param(self, param: Any) -> GradGroup:
        """Return the ranks that reduce the gradient of ``param``.

        Raises ArgumentError for an expert's parameter where ``expert_data_parallel`` was not given.
        """
        if not is_expert(param):
            return GradGroup(self.data_parallel, self.data_shard, self.data_replicate)
        if self.expert_data_parallel is UNSET:
            raise ArgumentError(
                "expert_data_parallel is not given, but a parameter has allreduce=False, which marks an expert's; pass "
                "ParallelGroups(expert_data_parallel=...), None where each rank has experts of its own"
            )
        return GradGroup(self.expert_data_parallel, self.expert_data_parallel, None)

    def tensor_of_param(self, param: Any) -> ProcessGroup | None:
        """Return the ranks that split ``param``, or hold copies of it, beside those that reduce its gradient."""
        return self.expert_tensor_parallel if is_expert(param) else self.tensor_parallel

    @classmethod
    def of(cls, groups: "ParallelGroups | ProcessGroup | DeviceMesh | None") -> "ParallelGroups":
        """Resolve what a user may pass as ``groups``.

        None: the whole world is data parallel if torch.distributed is initialised, else this rank alone.
        A ProcessGroup is data parallel. A DeviceMesh goes through :meth:`from_mesh`.
        """
        if groups is None:
            return cls(data_parallel=dist.group.WORLD) if is_initialized() else AssumedAlone()
        if isinstance(groups, cls):
            return groups
        if isinstance(groups, DeviceMesh):
            return cls.from_mesh(groups)
        if isinstance(groups, ProcessGroup) or validate.is_other_ranks_group(groups):
            return cls(data_parallel=validate.process_group("groups", groups))
        raise ArgumentTypeError(
            f"groups must be None, a ParallelGroups, a ProcessGroup or a DeviceMesh, got {groups!r}"
        )

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        data_parallel: Sequence[str] | str | None = None,
        tensor_parallel: Sequence[str] | str | None = None,
        data_replicate: Sequence[str] | str | None = None,
        expert_data_parallel: Sequence[str] | str | None = None,
        expert_tensor_parallel: Sequence[str] | str | None = None,
    ) -> "ParallelGroups":
        """Take the groups from a mesh; every rank of it calls this together (it may create groups).

        The arguments name mesh dimensions. Not given: the usual names are recognised (dp, dp_replicate, dp_shard, fsdp,
        cp, ...; tp, ...); an unnamed mesh of one dimension is data parallel. ``data_shard`` is what ``data_replicate``
        leaves of ``data_parallel``; ``grad_stats`` spans all dimensions of the mesh.
        """
        if mesh.get_coordinate() is None:
            raise ArgumentError(
                f"mesh is {mesh}, which this rank, {dist.get_rank()}, is not in; pass each rank a mesh of its own, or "
                "build this on the mesh's ranks only"
            )
        names = mesh.mesh_dim_names
        if names is None:
            if mesh.ndim == 1:
                return cls(data_parallel=mesh.get_group())
            raise ArgumentError(
                f"mesh has {mesh.ndim} dimensions without names; construct it with mesh_dim_names, e.g. ('dp', 'tp')"
            )
        data = _chosen(names, data_parallel, DATA_PARALLEL_NAMES, "data_parallel")
        replicate = _chosen(names, data_replicate, REPLICATE_NAMES, "data_replicate")
        shard = tuple(name for name in data if name not in replicate)
        if not shard or (data_replicate is None and not set(replicate) < set(data)):
            shard, replicate = data, ()
        tensor = _chosen(names, tensor_parallel, TENSOR_PARALLEL_NAMES, "tensor_parallel")
        return cls(
            data_parallel=_spanning(mesh, data),
            grad_stats=_spanning(mesh, names),
            tensor_parallel=_spanning(mesh, tensor),
            data_shard=_spanning(mesh, shard),
            data_replicate=_spanning(mesh, replicate),
            expert_data_parallel=_asked_for(mesh, expert_data_parallel, "expert_data_parallel"),
            expert_tensor_parallel=_asked_for(mesh, expert_tensor_parallel, "expert_tensor_parallel"),
        )


class AssumedAlone(ParallelGroups):
    """This rank alone, as no groups were given, and torch.distributed was not initialised."""


def is_expert(param: Any) -> bool:
    """Return whether ``param`` carries Megatron's mark of an expert's parameter."""
    return not getattr(param, "allreduce", True)


def ranks_of(group: ProcessGroup | None) -> frozenset[int]:
    """Return the global ranks of ``group``; of None, an empty set: this rank has no peers there."""
    return frozenset() if group is None else frozenset(dist.get_process_group_ranks(group))


def _chosen(
    names: tuple[str, ...], asked: Sequence[str] | str | None, usual: tuple[str, ...], argument: str
) -> tuple[str, ...]:
    if asked is None:
        return tuple(name for name in names if name in usual)
    chosen = (asked,) if isinstance(asked, str) else tuple(asked)
    for name in chosen:
        if name not in names:
            raise ArgumentError(f"{argument} names the mesh dimension {name!r}; the mesh has {names}")
    return chosen


def _asked_for(mesh: DeviceMesh, asked: Sequence[str] | str | None, argument: str) -> ProcessGroup | None:
    """Return the group over the mesh dimensions ``asked``: UNSET for None, this rank alone for an empty sequence."""
    if asked is None:
        return UNSET
    return _spanning(mesh, _chosen(mesh.mesh_dim_names or (), asked, (), argument))


def _spanning(mesh: DeviceMesh, names: tuple[str, ...]) -> ProcessGroup | None:
    """Return the group of this rank over the mesh dimensions ``names``."""
    if not names:
        return None
    if len(names) == 1:
        return mesh.get_group(names[0])
    return mesh[names]._flatten().get_group()
