"""The work that is the same for every contender: a model whose backward makes gradients that are given.

Peers reduce gradients from autograd hooks, so they need a backward. This one multiplies nothing: each block returns its
given gradients, of which autograd makes one copy, for every contender alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

SCALE = 2.0**16
CLIP = 1.0
LR = 1e-4
WEIGHT_DECAY = 0.01
EPS = 1e-8
GROWTH_INTERVAL = 1000
HYSTERESIS = 2
PARAMS_PER_BLOCK = 20
"""FSDP2 gathers and reduces block by block."""


@dataclass(frozen=True)
class Setup:
    """What a contender is built for.

    Attributes:
        rank, ranks: of the process group, which is initialised.
        device: of the parameters and of the given gradients.
        dtype: of the model parameters and of the given gradients: fp16 or bf16.
        bucket_numel: None leaves each contender its own default.
        options: the contender's own.
    """

    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    bucket_numel: int | None
    options: dict[str, Any]


class Contender(Protocol):
    """One way to train. A round is reduce(), then step()."""

    def reduce(self) -> None:
        """Zero gradients, run the given backward, and return when this rank's part of them is reduced."""

    def step(self) -> None:
        """Unscale, check for overflow, clip, update, and return when every model parameter is up to date here."""

    def parameters(self) -> list[Tensor]:
        """Return the model's parameters, whole, in the order of ``GivenModel.parameters``."""


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grads: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (grad_output, None, *ctx.grads)


class Block(nn.Module):
    """Parameters that take part in nothing, and the gradients that their backward returns."""

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(param) for param in params)
        self.grads = tuple(grads)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, as a function of the parameters."""
        return _Give.apply(x, self.grads, *self.weights)


class GivenModel(nn.Module):
    """``tensors`` parameters of shape [rows, columns], and their gradients, which are scaled by SCALE already."""

    def __init__(self, tensors: int, grads: Tensor, setup: Setup) -> None:
        super().__init__()
        numel = grads.numel() // tensors
        rows = math.gcd(numel, 1000)
        generator = torch.Generator(setup.device).manual_seed(0)
        values = (torch.randn(grads.numel(), generator=generator, device=setup.device) * 0.02).to(setup.dtype)
        made = [value.clone() for value in values.view(tensors, rows, -1)]
        given = list(grads.view(tensors, rows, -1))
        starts = range(0, tensors, PARAMS_PER_BLOCK)
        self.blocks = nn.ModuleList(
            Block(made[i : i + PARAMS_PER_BLOCK], given[i : i + PARAMS_PER_BLOCK]) for i in starts
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss of 0: shape [], fp32."""
        for block in self.blocks:
            x = block(x)
        return x


def given_grads(numel: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's gradients, scaled by SCALE, flat. Their norm is above CLIP, so that clipping has work to do."""
    generator = torch.Generator().manual_seed(1 + rank)
    return (torch.randn(numel, generator=generator) * (1e-3 * SCALE)).to(dtype)
