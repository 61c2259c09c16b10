"""watch(): the first module whose output or gradient is not finite, and what went into it."""

import gc
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.debug import report_overflows, watch
from megascale.errors import ArgumentTypeError
from megascale.step.overflow_report import NonFiniteModule, TensorStatistics
from tests.counting import OperatorCounter
from tests.overflow_cases import report_of


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


def _first(seen: Callable[[], NonFiniteModule | None]) -> NonFiniteModule:
    """Return the first event, which there must have been."""
    found = seen()
    if found is None:
        raise LookupError("nothing was seen")
    return found


def test_first_output_that_overflows() -> None:
    """The module inside names itself before those that call it; its input's statistics are those of that call."""
    model = _model(backward=False)
    seen = watch(model)
    model(torch.full((2, 2), 1e-6).half())
    assert seen.first() is None
    model(torch.tensor([1.0, -2.0, 0.0, 60.0]).half())
    found = _first(seen.first)
    assert (found.module, found.phase, found.call) == ("grow.1", "forward", 1)
    assert (found.inputs.minimum, found.inputs.maximum, found.inputs.share_non_finite) == (-2000.0, 60000.0, 0.0)
    assert found.inputs.mean_abs == 15750.0
    assert (found.inputs.dtype, found.found.share_non_finite) == (torch.float16, 0.75)
    assert str(found).startswith("output of 'grow.1' (call 1): float16 between 0 and 0")
    model(torch.full((4,), torch.nan).half())
    assert seen.first() == found
    seen.clear()
    assert seen.first() is None


class _Spoils(nn.Module):
    """Makes one element of its input infinite."""

    def forward(self, x: Tensor) -> Tensor:
        """Return shape [n]."""
        return x.where(torch.arange(len(x)) != 1, torch.inf)


def test_first_gradient_that_overflows() -> None:
    """Backward runs from the last module to the first: the gradient of an output is made by what follows it."""
    model = _model(backward=True)
    inputs = torch.ones(3, dtype=torch.float16, requires_grad=True)
    with watch(model) as seen:
        model(inputs).sum().backward()
    found = _first(seen.first)
    assert (found.module, found.phase) == ("grow.0", "backward")
    assert str(found).startswith("gradient of the output of 'grow.0' (call 0): ")
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
    found = _first(seen.first)
    assert found.module == "Nest"
    assert found.found == TensorStatistics(1.0, 1.0, 1.0, 0.5, torch.float32)
    with pytest.raises(ArgumentTypeError, match="model must be a"):
        watch(3)  # type: ignore[arg-type]


def test_a_step_does_not_hide_the_first_event() -> None:
    """What a step has taken, the watch's very first event too, stays the first until clear()."""
    module = nn.Sequential(_Spoils(), nn.Identity())
    seen = watch(module)
    module(torch.ones(4))
    taken = _first(seen.take())
    assert (taken.module, taken.call) == ("0", 0)
    module(torch.ones(4))
    assert seen.first() == taken
    later = _first(seen.take())
    assert (later.module, later.call) == ("0", 1)


def _overflowing_optimizer() -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """Return a model whose second layer overflows fp16 for inputs of ones."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    nn.init.ones_(layers[0].weight)
    nn.init.constant_(layers[1].weight, 1e4)
    for layer in layers:
        nn.init.zeros_(layer.bias)
    model = nn.Sequential(*layers).half()
    inner = torch.optim.SGD(model.named_parameters(), lr=1e-6)
    return model, MixedPrecisionOptimizer(inner, None, DynamicGradScaler(1.0, 1.0))


def _step(model: nn.Module, optimizer: MixedPrecisionOptimizer, value: float) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(model(torch.full((1, 4), value).half()).float().square().sum()).backward()
    optimizer.step()


@pytest.mark.parametrize("late", [False, True])
def test_overflow_reports_name_the_module(late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the watch is there: the module of the skipped step itself, in the report, the log line and the file."""
    model, optimizer = _overflowing_optimizer()
    optimizer._recipe.errors.on_host = optimizer._recipe.overflows._on_host = not late
    report_overflows(optimizer, model=model, path=tmp_path / "overflows.jsonl")
    seen = watch(model)
    with caplog.at_level(logging.WARNING, logger="megascale"):
        for value in (0.0, 1.0, 0.0, torch.nan, 0.0):
            _step(model, optimizer, value)
    report = report_of(optimizer)
    assert report.module is not None
    assert (report.step, report.module.module, report.module.phase, report.module.rank) == (3, "0", "forward", 0)
    assert f"first on rank 0: {report.module}" in str(report)
    assert "first in the forward of '1' on rank 0" in caplog.records[0].getMessage()
    rows = [json.loads(line) for line in (tmp_path / "overflows.jsonl").read_text().splitlines()]
    found = {(row["step"], row["module"], row["module_phase"], row["module_rank"]) for row in rows}
    assert found == {(1, "1", "forward", 0), (3, "0", "forward", 0)}
    first = _first(seen.first)
    assert first.module == "1"
    model(torch.full((1, 4), torch.nan).half())
    seen.remove()
    _step(model, optimizer, torch.nan)
    report = report_of(optimizer)
    assert (report.step, report.module) == (5, None)
