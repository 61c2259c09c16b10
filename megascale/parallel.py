"""Which ranks share what: the process groups of a step, resolved once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megascale.collectives import group_size
from megascale.errors import ArgumentError, ArgumentTypeError

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
TENSOR_PARALLEL_NAMES = ("tp", "tensor_parallel", "tensor")


class _Unset:
    """Marks a field that was not given, which is not the same as None."""

    def __repr__(self) -> str:
        return "unset"


UNSET: Any = _Unset()


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that one step needs. A field of None is this rank alone.

    Attributes:
        data_parallel: ranks that hold the same parameters and average their gradients.
        grad_stats: ranks that agree on `found_inf`, the norm and the zero count. Not given: ``data_parallel``, or
            ``tensor_parallel`` where only that is given. With both, name the group that spans both, or use
            :meth:`from_mesh`.
        tensor_parallel: ranks that split single parameters. Needed for parameters that carry Megatron's
            ``tensor_model_parallel`` attribute; DTensors bring their own mesh.
    """

    data_parallel: ProcessGroup | None = None
    grad_stats: ProcessGroup | None = UNSET
    tensor_parallel: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for field in ("data_parallel", "grad_stats", "tensor_parallel"):
            value = getattr(self, field)
            if value is not None and value is not UNSET and not isinstance(value, ProcessGroup):
                raise ArgumentTypeError(f"{field} must be a ProcessGroup or None, got {value!r}")
        if self.grad_stats is not UNSET:
            return
        if group_size(self.data_parallel) > 1 and group_size(self.tensor_parallel) > 1:
            raise ArgumentError(
                "grad_stats is not given, and data_parallel and tensor_parallel are both larger than one rank; "
                "pass the "
                "group that spans both (often torch.distributed.group.WORLD), or use ParallelGroups.from_mesh"
            )
        only = self.data_parallel if group_size(self.tensor_parallel) == 1 else self.tensor_parallel
        object.__setattr__(self, "grad_stats", only)

    @classmethod
    def of(cls, groups: "ParallelGroups | ProcessGroup | DeviceMesh | None") -> "ParallelGroups":
        """Resolve what a user may pass as ``groups``.

        None: the whole world is data parallel if torch.distributed is initialised, else this rank alone.
        A ProcessGroup is data parallel. A DeviceMesh goes through :meth:`from_mesh`.
        """
        if groups is None:
            return cls(data_parallel=dist.group.WORLD) if dist.is_available() and dist.is_initialized() else cls()
        if isinstance(groups, cls):
            return groups
        if isinstance(groups, DeviceMesh):
            return cls.from_mesh(groups)
        if isinstance(groups, ProcessGroup):
            return cls(data_parallel=groups)
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
    ) -> "ParallelGroups":
        """Take the groups from a mesh; every rank of it calls this together (it may create groups).

        ``data_parallel`` and ``tensor_parallel`` name mesh dimensions. Not given: the usual names are recognised
        (dp, dp_replicate, dp_shard, fsdp, cp, ...; tp, ...); an unnamed mesh of one dimension is data parallel.
        ``grad_stats`` spans all dimensions of the mesh.
        """
        names = mesh.mesh_dim_names
        if names is None:
            if mesh.ndim == 1:
                return cls(data_parallel=mesh.get_group())
            raise ArgumentError(
                f"mesh has {mesh.ndim} dimensions without names; construct it with mesh_dim_names, e.g. ('dp', 'tp')"
            )
        return cls(
            data_parallel=_spanning(mesh, _chosen(names, data_parallel, DATA_PARALLEL_NAMES, "data_parallel")),
            grad_stats=_spanning(mesh, names),
            tensor_parallel=_spanning(mesh, _chosen(names, tensor_parallel, TENSOR_PARALLEL_NAMES, "tensor_parallel")),
        )


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


def _spanning(mesh: DeviceMesh, names: tuple[str, ...]) -> ProcessGroup | None:
    """Return the group of this rank over the mesh dimensions ``names``."""
    if not names:
        return None
    if len(names) == 1:
        return mesh.get_group(names[0])
    return mesh[names]._flatten().get_group()
