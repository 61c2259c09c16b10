"""Newton-Schulz iterations: the orthogonal factor of a matrix, from matrix products alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.rules.muon import POLAR_EXPRESS, QUINTIC, Coefficients, iterations

__all__ = ["POLAR_EXPRESS", "QUINTIC", "Coefficients", "iteration_dtype", "iterations", "orthogonalize"]


def orthogonalize(matrix: Tensor, coefficients: Sequence[Coefficients], eps: float) -> Tensor:
    """Return the orthogonal factor U V^T of a matrix U S V^T, with singular values as near to 1 as they come.

    For a bf16 matrix the result has the bits of torch.optim.Muon.

    Args:
        matrix: shape [m, n]; the iterations are in its dtype.
        coefficients: one triple per iteration.
        eps: the smallest norm that it is divided by.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.mT if is_tall else matrix
    found = found / found.norm().clamp(min=eps)
    for a, b, c in coefficients:
        gram = found @ found.mT
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if is_tall else found


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that iterates fastest on ``device``: bf16, or fp32 on a CPU that emulates products of bf16."""
    if device.type != "cpu":
        return torch.bfloat16
    has = torch.cpu.get_capabilities()
    return torch.bfloat16 if has.get("avx512_bf16", False) or has.get("amx_tile", False) else torch.float32
