"""Newton-Schulz iterations: the orthogonal factor of a matrix, from matrix products alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.rules.muon import POLAR_EXPRESS, QUINTIC, Coefficients, iterations

__all__ = ["POLAR_EXPRESS", "QUINTIC", "Coefficients", "iteration_dtype", "iterations", "orthogonalize"]


def orthogonalize(matrices: Tensor, coefficients: Sequence[Coefficients], eps: float) -> Tensor:
    """Return the orthogonal factor U V^T of each matrix U S V^T, with singular values as near to 1 as they come.

    For a single bf16 matrix the result has the bits of torch.optim.Muon. In a batch each matrix goes through the same
    operations, but the last bits may differ: for another batch size a library may multiply by another kernel.

    Args:
        matrices: shape [m, n], or [batch, m, n] for several at once; the iterations are in their dtype.
        coefficients: one triple per iteration.
        eps: the smallest norm that a matrix is divided by.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    found = matrices.mT if is_tall else matrices
    norm = found.norm() if matrices.dim() == 2 else found.flatten(1).norm(dim=1).view(-1, 1, 1)
    found = found / norm.clamp(min=eps)
    for a, b, c in coefficients:
        gram = found @ found.mT
        found = product(found, product(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if is_tall else found


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that iterates fastest on ``device``: bf16, or fp32 on a CPU that emulates products of bf16."""
    if device.type != "cpu":
        return torch.bfloat16
    has = torch.cpu.get_capabilities()
    return torch.bfloat16 if has.get("avx512_bf16", False) or has.get("amx_tile", False) else torch.float32
