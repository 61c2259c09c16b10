"""Learning rates in tensors: the bits of numbers, on every backend that has the reference's."""

from collections.abc import Callable

import pytest
import torch

from megascale import Lion, MixedPrecisionOptimizer, OptimizerConfig
from tests.training import bits_equal

RULES: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.10506271397479489),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "lion": lambda params: Lion(params, lr=0.1, weight_decay=0.10506271397479489),
}


def _trained(backend: str, rule: str, shape: tuple[int, ...], lr: float | torch.Tensor, *, codes: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
    inner = RULES[rule]([param])
    inner.param_groups[0]["lr"] = lr
    first = torch.int8 if codes else torch.float32
    config = OptimizerConfig(bf16=True, backend=backend, exp_avg_dtype=first)
    optimizer = MixedPrecisionOptimizer(inner, config)
    for _ in range(4):
        param.grad = torch.randn(shape, generator=generator).bfloat16()
        optimizer.step()
    return dict(optimizer.main_params())["0"]


@pytest.mark.default("dtype0-shape2-sgd-False", "dtype1-shape0-lion-False", "dtype0-shape1-adamw-True")
@pytest.mark.native
@pytest.mark.parametrize(("rule", "codes"), [*((rule, False) for rule in RULES), ("adamw", True)])
@pytest.mark.parametrize("shape", [(), (1,), (64,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rate_in_a_tensor_rounds_as_a_number(
    rule: str, shape: tuple[int, ...], dtype: torch.dtype, codes: bool
) -> None:
    """Also for a parameter of no dimension, whose product with fp64 is fp64. ``1 - lr * decay`` is rounded once."""
    lr = torch.tensor(0.08146636673023626, dtype=dtype)
    number = _trained("reference", rule, shape, float(lr), codes=codes)
    for backend in ("reference", "native", *(["torch"] if codes else [])):
        assert bits_equal(_trained(backend, rule, shape, lr, codes=codes), number), backend
