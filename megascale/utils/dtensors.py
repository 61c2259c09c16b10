"""DTensors, known without importing torch.distributed.tensor: that takes half a second, and brings sympy.

Where nobody has imported it there is no DTensor.
"""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether ``value`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, getattr(module, "DTensor", ()))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor itself. Call it without grad mode: the part aliases."""
    return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def distribute_like(tensor: Tensor, like: "DTensor") -> "DTensor":
    """Return ``tensor``, which every rank holds whole, with the placements of ``like``. Communicates nothing."""
    from torch.distributed.tensor import distribute_tensor

    source = tensor.detach().to(like.device)
    return distribute_tensor(source, like.device_mesh, like.placements, src_data_rank=None)


def dtensor_like(part: Tensor, like: Tensor) -> Tensor:
    """Return a local tensor as the kind of tensor ``like`` is: a DTensor of its placements, or itself."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.size(), stride=like.stride()
    )
