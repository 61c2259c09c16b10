"""Newton-Schulz iterations: the orthogonal factor of a matrix, from matrix products alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]
"""a, b, c of one iteration X <- aX + (bA + cAA)X with A = XX^T."""

QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
"""Few iterations suffice, as it is steep at 0, but singular values end anywhere between 0.7 and 1.2.
Source: kellerjordan.github.io/posts/muon."""

_POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SAFETY = 1.01
_LAST: Coefficients = (1.875, -1.25, 0.375)

POLAR_EXPRESS: tuple[Coefficients, ...] = (
    *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
    _LAST,
)
"""Polar Express (arXiv 2505.16932): one polynomial for each iteration, the best of its degree for singular values from
1e-3 to 1. A safety factor of 1.01 allows for the rounding of bf16. Further iterations repeat the last polynomial."""


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


def iterations(coefficients: Sequence[Coefficients], steps: int) -> tuple[Coefficients, ...]:
    """Return one triple for each of ``steps`` iterations. If there are fewer, the last one is repeated."""
    return tuple(coefficients[min(index, len(coefficients) - 1)] for index in range(steps))


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that iterates fastest on ``device``: bf16, or fp32 on a CPU that emulates products of bf16."""
    if device.type != "cpu":
        return torch.bfloat16
    has = torch.cpu.get_capabilities()
    return torch.bfloat16 if has.get("avx512_bf16", False) or has.get("amx_tile", False) else torch.float32
