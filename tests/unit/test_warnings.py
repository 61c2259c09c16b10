"""Warnings show a line of the user's program, which can be changed, and not one of the library's."""

import inspect
import warnings

import pytest
import torch
from torch import nn

import megascale
from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.kernels import selection


def _here() -> int:
    """Return the line that has called the function that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def _optimizer(grad: float) -> MixedPrecisionOptimizer:
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    config = OptimizerConfig(fp16=True, loss_scale=2.0)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.1), config, ConstantGradScaler(2.0))
    param.grad = torch.full_like(param, grad)
    return optimizer


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("grad", "said"), [(float("inf"), "were skipped"), (0.0, "no gradient, or none but zeros")])
def test_a_step_warns_at_the_line_that_steps(grad: float, said: str, halves: bool) -> None:
    """However many functions of torch and of the library lie between: hooks, profiling, no_grad."""
    optimizer = _optimizer(grad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(32):
            optimizer.scale_loss(torch.ones(()))
            lines = range(_here() + 2, _here() + 6)
            if halves:
                optimizer.prepare_grads()
                optimizer.step_with_ready_grads()
            else:
                optimizer.step()
    warning = [each for each in caught if said in str(each.message)][-1]  # in the last step, the 32nd
    assert warning.filename == __file__
    assert warning.lineno in lines


def test_a_backend_that_is_missing_is_warned_of_at_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(selection, "_MAKERS", selection._MAKERS | {"native": _unavailable})
    param, line = nn.Parameter(torch.ones(4)), _here() + 2
    with pytest.warns(UserWarning, match="Using the torch backend") as caught:
        MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.1))
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def _unavailable(_: torch.device | None) -> None:
    raise megascale.errors.UsageError("no compiler")


@pytest.mark.parametrize("scale", [2.0, 1.0])
def test_a_warning_of_skips_names_what_finds_the_cause(scale: float) -> None:
    """Which parameter, and which module; at the floor of the scale, too, in words for who has no config."""
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler = megascale.DynamicGradScaler(scale, min_scale=1.0, hysteresis=1)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.1), None, scaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(32):
            optimizer.scale_loss(torch.ones(()))
            param.grad = torch.full_like(param, float("inf"))
            optimizer.step()
    said = [str(each.message) for each in caught]
    assert [any(what in one for one in said) for what in ("were skipped", "at the smallest loss scale")] == [True, True]
    for one in said:
        assert "optimizer.last_overflow()" in one
        assert "megascale.debug.watch(model)" in one
    assert any("lower min_scale of the grad scaler (config.min_loss_scale)" in one for one in said)
