"""Works with DTensors without importing torch.distributed.tensor, which takes half a second and imports sympy.

While it is not imported, no DTensor exists.
"""

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_LOCAL = attrgetter("_local_tensor")  # map() calls it in C


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether ``value`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, getattr(module, "DTensor", ()))


def is_cut(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor of which ranks hold different parts."""
    if not is_dtensor(tensor):
        return False
    from torch.distributed.tensor import Replicate

    return any(
        type(placement) is not Replicate and tensor.device_mesh.size(mesh_dim) > 1
        for mesh_dim, placement in enumerate(tensor.placements)
    )


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor itself. Shares memory, so call it under no_grad()."""
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def held(tensor: Tensor) -> Tensor:
    """Return the tensor that a DTensor holds as this rank's part, not a new view of it; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def all_held(tensors: Sequence[Any]) -> list[Any]:
    """Return what :func:`held` returns of each, in some 20 ns per tensor. Some may be None."""
    module = sys.modules.get("torch.distributed.tensor")
    kinds = set(map(type, tensors))
    wrappers = {kind for kind in kinds if issubclass(kind, module.DTensor)} if module is not None else set()
    if not wrappers:
        return list(tensors)
    if kinds == wrappers:
        return list(map(_LOCAL, tensors))
    return [tensor._local_tensor if type(tensor) in wrappers else tensor for tensor in tensors]


def distribute_like(tensor: Tensor, like: "DTensor") -> "DTensor":
    """Return ``tensor``, which every rank holds whole, with the placements of ``like``. Communicates nothing."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def row_cuts(tensor: "DTensor") -> int | None:
    """Return how many parts a DTensor has along dimension 0; None if it is cut along another, or a partial sum."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    parts = 1
    for mesh_dim, placement in enumerate(tensor.placements):
        size = tensor.device_mesh.size(mesh_dim)
        if size == 1 or type(placement) is Replicate:
            continue
        if not isinstance(placement, (Shard, _StridedShard)) or placement.dim % tensor.dim() != 0:
            return None
        parts *= size
    return parts


def first_row(tensor: "DTensor") -> int:
    """Return the index, along dimension 0, of the first row of this rank's part, which has consecutive rows."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offset[0]) if offset else 0


def dtensor_like(part: Tensor, like: Tensor) -> Tensor:
    """Return ``part`` as a DTensor with the placements of ``like`` if that is one, else ``part`` itself."""
    return placed_like(part, like, like.shape, like.stride()) if is_dtensor(like) else part


def placed_like(part: Tensor, like: "DTensor", shape: torch.Size, stride: tuple[int, ...]) -> "DTensor":
    """Return a DTensor that holds ``part`` itself, with the placements of ``like``. ``shape, stride``: of the whole."""
    from torch.distributed.tensor import DTensor

    # In place of ``part``: from_local() moves what is in host memory, takes a view, whose base would keep memory that
    # offload() frees, and takes over the offset in the storage, with which torch cannot deep-copy a DTensor.
    other = part.new_empty(()).expand(part.shape)
    made: Any = DTensor.from_local(
        other, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    placed: DTensor = made.to(part.device)
    placed._local_tensor = part
    return placed
