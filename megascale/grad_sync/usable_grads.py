"""Checks whether a step can use a gradient, and whether a GradSync can take one that the caller made."""

import torch
from torch import Tensor, nn

from megascale.errors import GradientError, sparse_gradient
from megascale.grad_sync.bucket import SyncedBucket
from megascale.kernels import tensor_fault
from megascale.utils.dtensors import is_dtensor, to_local


def gradient_error(name: str, grad: Tensor, param: Tensor) -> GradientError | None:
    """Return the error for a gradient that cannot be used for parameter ``name``, or None."""
    if grad.layout != torch.strided:
        return sparse_gradient(name, grad.layout)
    error = memory_error(repr(name), grad, param)
    if error is None and not grad.dtype.is_floating_point:
        return GradientError(f"the gradient of {name!r} has dtype {grad.dtype}; make it floating point")
    return error


def memory_error(name: str, grad: Tensor, param: Tensor) -> GradientError | None:
    """Return the error for a dense gradient that no kernel can read, or that has another shape than its parameter."""
    part, own = to_local(grad), to_local(param)
    fault = tensor_fault(part)
    if fault is not None:
        return GradientError(f"the gradient of {name} {fault}; run backward anew, after zero_grad()")
    if grad.shape != param.shape or part.shape != own.shape or part.device != own.device:
        return GradientError(
            f"the gradient of {name} is {tuple(grad.shape)} on {part.device}, the parameter {tuple(param.shape)} on "
            f"{own.device}; it is of an earlier state of the parameter: call zero_grad() before backward"
        )
    return None


def why_not_taken(name: str, param: nn.Parameter, grad: Tensor, bucket: SyncedBucket) -> GradientError | None:
    """Return the error for a gradient that the caller put into ``param.grad``; None if it can be taken."""
    if is_dtensor(grad):
        return GradientError(f"the gradient of {name!r} is a DTensor, its parameter is none; call grad.to_local()")
    if grad.layout != torch.strided:
        return sparse_gradient(name, grad.layout)
    if name in bucket.fresh and param.requires_grad:
        return None
    reason = "it was put there after backward" if param.requires_grad else "the parameter is frozen"
    return GradientError(
        f"{name!r} has a gradient in param.grad that would be ignored: {reason}; put gradients "
        "there before backward or instead of it, or change GradSync.main_grad(param) after finish(). If a "
        "DistributedDataParallel is around the module, drop it, and train the bare module: it reduces gradients too"
    )
