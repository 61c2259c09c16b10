"""watch(): the first module whose output or gradient is not finite, and what went into it."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.debug import watch
from megascale.errors import ArgumentTypeError
from tests.counting import OperatorCounter


class _GrowGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1000


class _Grow(nn.Module):
    """Multiplies by 1000, forward or backward."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        """Return the shape of ``x``."""
        if not self.backward:
            return x * 1000
        out: Tensor = _GrowGrad.apply(x)
        return out


class _Named(nn.Module):
    def __init__(self, grow: nn.Module) -> None:
        super().__init__()
        self.start = nn.Identity()
        self.grow = grow

    def forward(self, x: Tensor) -> Tensor:
        """Return the shape of ``x``."""
        out: Tensor = self.grow(self.start(x))
        return out


def _model(backward: bool) -> nn.Module:
    """Return a model of which 'grow.1', or backward through it, overflows fp16."""
    return _Named(nn.Sequential(_Grow(backward), _Grow(backward), _Grow(backward)))


def test_first_output_that_overflows() -> None:
    """The module inside names itself before those that call it; its input's statistics are those of that call."""
    model = _model(backward=False)
    seen = watch(model)
    model(torch.full((2, 2), 1e-6).half())
    assert seen.first() is None
    model(torch.tensor([1.0, -2.0, 0.0, 60.0]).half())
    found = seen.first()
    assert found is not None
    assert (found.module, found.phase, found.call) == ("grow.1", "forward", 1)
    assert (found.inputs.minimum, found.inputs.maximum, found.inputs.share_non_finite) == (-2000.0, 60000.0, 0.0)
    assert found.inputs.mean_abs == 15750.0
    assert (found.inputs.dtype, found.found.share_non_finite) == (torch.float16, 0.75)
    assert "output of 'grow.1' (call 1): float16 between 0 and 0" in str(found)
    model(torch.full((4,), torch.nan).half())
    assert seen.first() == found
    seen.clear()
    assert seen.first() is None


def test_first_gradient_that_overflows() -> None:
    """Backward runs from the last module to the first: the gradient of an output is made by what follows it."""
    model = _model(backward=True)
    inputs = torch.ones(3, dtype=torch.float16, requires_grad=True)
    with watch(model) as seen:
        model(inputs).sum().backward()
    found = seen.first()
    assert found is not None
    assert (found.module, found.phase) == ("grow.0", "backward")
    assert found.inputs.maximum == 1.0


def test_hooks_end() -> None:
    """Invariant 11: hooks end with the context, and with the watch."""
    model = _model(backward=False)

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    with watch(model):
        assert hooks() == 6
    assert hooks() == 0
    kept = watch(model)
    del kept
    gc.collect()
    assert hooks() == 0


def test_watching_reads_nothing() -> None:
    """Invariant 5: forward and backward have no host read; the first module is known when it is asked for."""
    model = _model(backward=True)
    seen = watch(model)
    with OperatorCounter() as counter:
        model(torch.ones(3, dtype=torch.float16, requires_grad=True)).sum().backward()
    assert counter.host_reads == 0
    assert seen.first() is not None


def test_structures_and_integers_pass() -> None:
    """Inputs by keyword, outputs in dicts, integers, and empty tensors."""

    class Nest(nn.Module):
        def forward(self, ids: Tensor, *, x: Tensor) -> dict[str, Tensor]:
            return {"ids": ids, "x": x, "none": x[:0]}

    model = Nest()
    seen = watch(model)
    model(torch.arange(3), x=torch.tensor([1.0, torch.inf]))
    found = seen.first()
    assert found is not None
    assert found.module == "Nest"
    assert found.found.share_non_finite == 0.5
    with pytest.raises(ArgumentTypeError, match="model must be a"):
        watch(3)  # type: ignore[arg-type]
