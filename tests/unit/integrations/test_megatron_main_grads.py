"""Gradients that Megatron's DistributedDataParallel keeps in ``param.main_grad``, without Megatron."""

from typing import Any

import torch
from torch import nn

from megascale import ConstantGradScaler, MixedPrecisionOptimizer
from megascale.integrations.megatron import MainGrads


def _step(main_grad: bool) -> torch.Tensor:
    """Return fp16 weights after one step of SGD, from gradients in ``main_grad`` (fp32) or in ``grad`` (fp16)."""
    param: Any = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float16))
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD([param], lr=0.5),
        grad_scaler=ConstantGradScaler(64.0),
        grad_sync=MainGrads() if main_grad else None,
        grads_are_scaled=True,
    )
    scaled = 64.0 * torch.arange(6.0)
    if main_grad:
        param.main_grad = scaled
    else:
        param.grad = scaled.half()
    assert optimizer.step().success
    weights: torch.Tensor = param.detach()
    return weights


def test_a_step_reads_the_main_grad() -> None:
    """A step from ``main_grad`` is that from the same gradient in ``param.grad``."""
    assert torch.equal(_step(main_grad=True), _step(main_grad=False))
