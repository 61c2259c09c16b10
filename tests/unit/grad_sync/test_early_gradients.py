"""Gradients that a parameter has before a GradSync takes it."""

import pytest
import torch
from torch import nn

from megascale.grad_sync import GradSync


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gradient_from_before_counts(dtype: torch.dtype) -> None:
    """It has arrived, and its memory is given up."""
    first, second = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    first.grad = torch.full((3,), 2.0, dtype=dtype)
    sync = GradSync([("first", first), ("second", second)])
    assert first.grad is None
    (3 * second).sum().backward()
    sync.finish()
    for param, expected in ((first, 2.0), (second, 3.0)):
        grad = sync.local_grad(param)
        assert grad is not None
        assert grad.tolist() == [expected] * 3


def test_main_grads_that_come_back_are_written() -> None:
    """With the values that they had. A copy that was made before does not count: others may have used the memory."""
    param = nn.Parameter(torch.ones(3))
    sync = GradSync([("param", param)])
    (3 * param).sum().backward()
    sync.finish()
    grad = sync.local_grad(param)
    assert grad is not None
    before = grad._version
    sync.leave(pin=False)
    sync.come_back()
    assert grad.tolist() == [3.0] * 3
    assert grad._version > before
