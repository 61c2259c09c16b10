"""The work of one optimizer step on one rank, the same for every contender of step.py.

Unscale, check for overflow, clip to CLIP, AdamW in fp32, and every model parameter rounded from its master.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from peers.given import SCALE

GRAD_NORM = 10.0
"""Of the unscaled gradients: above CLIP, so that clipping has work to do."""
LARGEST_STD = 0.05
"""Of an unscaled gradient's elements: SCALE times that is far from fp16's limit."""

Traffic = dict[str, int]
"""Bytes per parameter that each pass of a step has to read and write."""


class UnavailableError(Exception):
    """A contender cannot run here; the message is the reason that its row shows."""


@dataclass(frozen=True)
class Work:
    """What a contender is built for.

    Attributes:
        numel: elements of all parameters.
        tensors: how many parameters there are; they are equal and have one dimension.
        dtype: of parameters and gradients: fp16, bf16 or fp32.
        device: of both.
        grads: the gradients, multiplied by SCALE. Contenders share them, so none may write to them.
        options: the contender's own.
    """

    numel: int
    tensors: int
    dtype: torch.dtype
    device: torch.device
    grads: list[Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def half(self) -> bool:
        """Whether parameters have 16 bits."""
        return self.dtype.itemsize == 2

    def parameters(self, dtype: torch.dtype | None = None) -> list[nn.Parameter]:
        """Return new parameters, with the same values at every call, in ``dtype`` (None: that of the work)."""
        generator = torch.Generator(self.device).manual_seed(0)
        values = torch.randn(self.numel, generator=generator, device=self.device).mul_(0.02).to(self.dtype)
        each = values.split(self.numel // self.tensors)
        return [nn.Parameter(value.to(dtype or self.dtype, copy=True)) for value in each]

    def parameters_with_grads(self) -> list[nn.Parameter]:
        """Return new parameters that have the shared gradients."""
        params = self.parameters()
        for param, grad in zip(params, self.grads, strict=True):
            param.grad = grad
        return params


def given_work(numel: int, tensors: int, dtype: torch.dtype, device: torch.device) -> Work:
    """Return work on ``tensors`` parameters of ``numel`` elements in all, rounded down to a multiple of ``tensors``."""
    numel = numel // tensors * tensors
    generator = torch.Generator(device).manual_seed(1)
    std = min(LARGEST_STD, GRAD_NORM / math.sqrt(numel))
    flat = torch.randn(numel, generator=generator, device=device).mul_(std * SCALE).to(dtype)
    return Work(numel, tensors, dtype, device, [grad.clone() for grad in flat.split(numel // tensors)])


class Stepper(Protocol):
    """One way to take the step. A round is prepare(), which is not timed, then step().

    Attributes:
        traffic: what its passes move.
        own_grad_bytes: bytes per parameter of gradients that it holds itself, 0 where it reads the shared ones.
    """

    traffic: Traffic
    own_grad_bytes: int

    def prepare(self) -> None:
        """Put the gradients where backward would have left them."""

    def step(self) -> None:
        """Take the step, or queue it on the device."""

    def parameters(self) -> list[Tensor]:
        """Return the model parameters."""
