"""State that the kernels need is there, and what cannot be read as torch reads it is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError, UsageError
from megascale.step.kernel_state import rate
from tests.training import bits_equal

Change = Callable[[Tensor], Any]


def _trained(kind: Any = torch.optim.AdamW, **config: Any) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    """Return three parameters after a step, with gradients for the next one."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 5)) for _ in range(3)]
    optimizer = MixedPrecisionOptimizer(kind(params, lr=0.1), OptimizerConfig(**config))
    for param in params:
        param.grad = torch.randn(6, 5)
    optimizer.step()
    return params, optimizer


STEPS: dict[str, tuple[Change, str]] = {
    "two": (lambda _: torch.ones(2), r"has shape \(2,\) and dtype torch.float32; it must be one number"),
    "complex": (
        lambda step: step.to(torch.complex64),
        r"has shape \(\) and dtype torch.complex64; it must be one numb",
    ),
    "none": (lambda _: torch.ones(0), r"has shape \(0,\) and dtype torch.float32; it must be one number"),
    "text": (lambda _: "two", "is a str; it must be a tensor"),
}


@pytest.mark.parametrize("step", STEPS)
def test_step_that_is_not_one_number_is_refused(step: str) -> None:
    """Invariant 10: before a bit changes, where it was put into the state, and where a trained optimizer is wrapped."""
    change, message = STEPS[step]
    params, optimizer = _trained()
    state = optimizer._inner.state[params[1]]
    right, before = state["step"], [param.detach().clone() for param in params]
    state["step"] = change(right)
    with pytest.raises(UsageError, match=rf"state\['1'\]\['step'\] {message}"):
        optimizer.step()
    inner = optimizer._inner
    del optimizer
    with pytest.raises(UsageError, match=rf"state\['1'\]\['step'\] {message}"):
        MixedPrecisionOptimizer(inner)
    assert all(bits_equal(param.detach(), old) for param, old in zip(params, before, strict=True))
    state["step"] = right
    assert MixedPrecisionOptimizer(inner).step().success


@pytest.mark.parametrize("name", ["amsgrad", "eps"])
def test_option_that_lacks_is_named_when_the_optimizer_is_wrapped(name: str) -> None:
    """No state is made for it."""
    inner = torch.optim.AdamW([nn.Parameter(torch.ones(4))])
    del inner.param_groups[0][name]
    with pytest.raises(ArgumentError, match=f"a param group lacks '{name}'"):
        MixedPrecisionOptimizer(inner)
    assert not inner.state


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_rate_in_a_tensor_is_read_in_fp32_or_fp64(given: torch.dtype, read: torch.dtype) -> None:
    """Of any real dtype and any shape of one element, as a tensor without dimensions."""
    found = rate({"lr": torch.ones((1, 1), dtype=given)})
    assert isinstance(found, Tensor)
    assert bits_equal(found, torch.ones((), dtype=read))
