"""The torch backend on an accelerator: its statistics and flags; its launches do not grow with tensors."""

import math

import pytest
import torch

from benchmarks.peers.measure import count_launches
from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.kernels import Operands, select_backend
from tests.training import Bag

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="counts CUDA's launches")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_statistics(dtype: torch.dtype) -> None:
    """Exact counts, sums to fp32's accuracy, of tensors beyond one block too."""
    generator = torch.Generator("cuda").manual_seed(0)
    grads = [
        torch.randn(numel, generator=generator, device="cuda").to(dtype) for numel in (3, 0, 70_000, (1 << 24) + 5)
    ]
    grads[2][[0, 69_999]] = torch.tensor([math.inf, math.nan], dtype=dtype, device="cuda")
    grads[3][:1000] = 0
    stats = select_backend("torch").measure(grads, True)
    assert stats.zeros is not None
    for index, grad in enumerate(grads):
        exact = grad.double()
        assert stats.non_finite[index].item() == (~exact.isfinite()).sum().item()
        assert stats.zeros[index].item() == (exact == 0).sum().item()
        if index != 2:
            torch.testing.assert_close(stats.sum_squares[index], exact.square().sum(), rtol=2e-6, atol=0)


def test_overflow_flags() -> None:
    """Either sign and NaN, in long tensors too; bf16 never."""
    mains = [torch.zeros(length, device="cuda") for length in (2, 1, 70_000, 300_000, 1)]
    for main, value in zip(mains, (65519.996, -65520.0, 65520.0, math.nan, 1e9), strict=True):
        main[-1] = value
    models = [main.bfloat16() if index == 4 else main.half() for index, main in enumerate(mains)]
    assert select_backend("torch").write_back_(Operands(models, mains)).tolist() == [False, True, True, True, False]


def test_launches_do_not_grow_with_tensors() -> None:
    """A step on 400 tensors launches less than one kernel per tensor."""
    module = Bag([torch.ones(50, device="cuda").half() for _ in range(400)])
    config = OptimizerConfig(fp16=True, clip_grad=1.0, backend="torch")
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3)
    optimizer = MixedPrecisionOptimizer(
        inner, config, DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 4, 1), grads_are_scaled=True
    )
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert count_launches(optimizer.step) < 200
