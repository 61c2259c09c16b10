"""Weights for a rollout: what a model computes with now, whole on every rank, by name."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import ArgumentTypeError
from megascale.utils.collectives import meet
from megascale.utils.dtensors import is_dtensor
from megascale.utils.param_names import bare


@torch.no_grad()
def rollout_weights(
    model: nn.Module, optimizer: MegascaleOptimizer | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all that ``model.state_dict()`` has, whole and current, one after the other.

    ``dict(rollout_weights(model, optimizer))`` is a state dict. Names are without the prefixes of
    DistributedDataParallel and torch.compile. A tensor that FSDP2 or tensor parallelism has cut is gathered when its
    turn comes, and is the caller's to keep or drop; any other is the model's own memory: copy it before the next step.

    All ranks iterate to the end together, if any tensor is a DTensor. One that is alone raises UsageError, which names
    the others, after half of the time that its process group waits for a message.

    Args:
        model: that is trained.
        optimizer: its optimizer, any of megascale's. None: no gather of it is under way.
        dtype: to which floating point tensors are cast; None: as they are, 16 bits for 16-bit weights.

    Raises ArgumentTypeError, at the first iteration, for an argument of another type.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, MegascaleOptimizer):
        raise ArgumentTypeError(f"optimizer must be one of megascale's, or None, got {type(optimizer).__name__}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"dtype must be a torch.dtype such as torch.float16, or None, got {dtype!r}")
    if optimizer is not None:
        optimizer.finish_param_gather()
    state = model.state_dict()
    for mesh in dict.fromkeys(value.device_mesh for value in state.values() if is_dtensor(value)):
        for dim in range(mesh.ndim):
            meet(mesh.get_group(dim), "rollout_weights()")
    for name, value in state.items():
        tensor = value.full_tensor() if is_dtensor(value) else value
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield bare(name), tensor
