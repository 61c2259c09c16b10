"""Checks whether a step can use a gradient."""

import torch
from torch import Tensor

from megascale.errors import GradientError, sparse_gradient
from megascale.kernels import memory_fault
from megascale.utils.dtensors import to_local


def gradient_error(name: str, grad: Tensor, param: Tensor) -> GradientError | None:
    """Return the error for a gradient that cannot be used for parameter ``name``, or None."""
    if grad.layout != torch.strided:
        return sparse_gradient(name, grad.layout)
    error = memory_error(repr(name), grad, param)
    if error is None and not grad.dtype.is_floating_point:
        return GradientError(f"the gradient of {name!r} has dtype {grad.dtype}; make it floating point")
    return error


def memory_error(name: str, grad: Tensor, param: Tensor) -> GradientError | None:
    """Return the error for a dense gradient that has lost its memory, or has another shape than its parameter."""
    part, own = to_local(grad), to_local(param)
    fault = memory_fault(part)
    if fault is not None:
        return GradientError(f"the gradient of {name} {fault}; run backward anew, after zero_grad()")
    if grad.shape != param.shape or part.shape != own.shape or part.device != own.device:
        return GradientError(
            f"the gradient of {name} is {tuple(grad.shape)} on {part.device}, the parameter {tuple(param.shape)} on "
            f"{own.device}; it is of an earlier state of the parameter: call zero_grad() before backward"
        )
    return None
