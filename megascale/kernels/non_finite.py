"""Inf and NaN of one tensor, told apart and counted. It reads the tensor several times: for tensors that overflowed."""

import torch
from torch import Tensor


@torch.no_grad()
def describe_non_finite(tensor: Tensor) -> Tensor:
    """Return (elements that are inf, elements that are NaN, largest finite magnitude): fp64 (MPS: fp32), shape [3].

    On the tensor's device, without a host sync. The magnitude is 0 where no element is finite.
    """
    exact = torch.float32 if tensor.device.type == "mps" else torch.float64
    size = tensor.abs()
    num_inf, num_nan = (size == torch.inf).sum(dtype=exact), (size != size).sum(dtype=exact)
    finite = torch.nan_to_num(size, nan=0.0, posinf=0.0)
    largest = finite.amax() if tensor.numel() else finite.new_zeros(())
    return torch.stack([num_inf, num_nan, largest.to(exact)])
