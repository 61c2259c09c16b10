"""What others do to tensors between steps is followed; what the step itself does is not taken for theirs."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.kernels import GradReader
from megascale.kernels.tensors import forms
from megascale.main_params.main_param import MainParam
from megascale.main_params.write_tracker import WriteTracker
from tests.training import bits_equal


def test_a_reader_lets_go_of_gradients() -> None:
    """What is remembered of a step's gradients keeps none of them alive."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(5)]
    reader = GradReader(list(params))
    gone: list[weakref.ref[Tensor]] = []
    for _ in range(4):
        for param in params:
            param.grad = torch.ones(3)
        grads = reader.read()
        assert grads is not None
        gone += [weakref.ref(param.grad) for param in params if param.grad is not None]
        for param in params:
            param.grad = None
        del grads
    assert all(reference() is None for reference in gone)


@pytest.mark.usefixtures("reader")
def test_gradients_that_no_longer_fit_are_found() -> None:
    """A gradient that becomes one of another kind, or of other memory, is looked at again; one that stays is not."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(5)]
    reader = GradReader(list(params))
    for param in params:
        param.grad = torch.ones(3)

    def fit() -> bool:
        return reader.read() is not None

    assert [fit(), fit()] == [True, True]
    params[2].grad = torch._neg_view(torch.ones(3))
    assert [fit(), fit()] == [False, False]
    params[2].grad = torch.ones(3)
    assert fit()
    params[2].grad = torch.ones(9)[6:]
    assert fit()
    params[2].grad.untyped_storage().resize_(32)
    assert not fit()
    params[2].grad = torch.ones(3)
    assert fit()
    params[2].grad.untyped_storage().resize_(0)
    assert not fit()


@pytest.mark.usefixtures("reader")
def test_a_watch_that_takes_a_param_asks_again() -> None:
    """What a param was found to be is no longer so once it was taken as it is now, and once it has moved again."""
    param, rest = nn.Parameter(torch.zeros(3)), [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    watch = WriteTracker([param, *rest])
    first, second = param.data, torch.zeros(3)
    assert not watch.moved()
    param.data = second
    assert watch.written() == [0]
    assert watch.moved()
    watch.take(0)
    assert watch.written() == []
    assert not watch.moved()
    param.data = first
    assert watch.moved()
    assert watch.written() == [0]
    other = WriteTracker([nn.Parameter(first), *rest])
    watch.remember(0, other, 0)
    assert not watch.moved()


@pytest.mark.usefixtures("reader")
def test_a_storage_cut_short_at_its_address_is_found() -> None:
    """Freed and made anew where it was, but smaller: the address and the form are the same, the size is not."""
    param, rest = nn.Parameter(torch.zeros(4096)), [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    watch = WriteTracker([param, *rest])
    assert watch.written() == []
    storage, address = param.untyped_storage(), param.data_ptr()
    for _ in range(100):
        storage.resize_(0)
        storage.resize_(8192)
        if param.data_ptr() == address:
            break
    assert watch.written() == [0]


def _train() -> list[Tensor]:
    """Ten steps with an overflow, a weight written outside, one that moves, a frozen one, and a missing gradient."""
    torch.manual_seed(0)
    params: list[nn.Parameter] = [nn.Parameter(torch.randn(index % 7 + 1).half()) for index in range(80)]
    groups: list[dict[str, Any]] = [{"params": params[:50]}, {"params": params[50:], "lr": 1e-2}]
    inner = torch.optim.AdamW(groups, lr=1e-3)
    scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1)
    optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True, clip_grad=1.0), scaler, grads_are_scaled=True)
    for step in range(10):
        for param in params:
            param.grad = torch.randn_like(param) if param.requires_grad else None
        match step:
            case 3:
                params[60].grad.fill_(float("inf"))  # type: ignore[union-attr]
            case 4:
                with torch.no_grad():
                    params[5].mul_(2)
            case 5:
                params[6].data = params[6].data.clone() + 1
            case 6:
                params[7].requires_grad_(False).grad = None
            case 7:
                inner.state[params[9]]["exp_avg"] = torch.ones_like(inner.state[params[9]]["exp_avg"])
            case _:
                pass
        optimizer.step()
    mains = [main for _, main in optimizer.main_params()]
    return [*params, *mains, *(t for state in inner.state.values() for t in state.values()), scaler.scale]


def test_training_is_the_same_bits_with_and_without_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others write, move, freeze or replace between steps is followed alike."""
    guarded = _train()
    monkeypatch.setattr(forms, "TensorGuards", None)
    plain = _train()
    assert all(bits_equal(a, b) for a, b in zip(guarded, plain, strict=True))
    assert guarded[-1].item() != 2.0**8


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.usefixtures("reader")
def test_own_writes_are_not_taken_for_those_of_others(odd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step, landed or skipped, nothing is to be followed; a write of another's is, once.

    Also where a gradient is laid out otherwise than its parameter, which torch then updates beside the kernels.
    """
    followed: list[str] = []
    follow = MainParam.sync_from_model

    def noted(self: MainParam) -> None:
        followed.append(self.name)
        follow(self)

    monkeypatch.setattr(MainParam, "sync_from_model", noted)
    params = [nn.Parameter(torch.randn(5).half()) for _ in range(60)]
    if odd:
        params[40] = nn.Parameter(torch.randn(4, 6).half().t())
    inner = torch.optim.AdamW([{"params": params[:20]}, {"params": params[20:]}], lr=1e-3)
    optimizer = MixedPrecisionOptimizer(
        inner, None, DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 3, 1), grads_are_scaled=True
    )
    for step in range(6):
        for param in params:
            param.grad = torch.full(param.shape, float("inf") if step == 2 else 1.0).half()
        if step == 4:
            with torch.no_grad():
                params[30].add_(1)
        optimizer.step()
        assert followed == (["30"] if step >= 4 else [])


def test_gradients_may_be_dropped_between_the_halves_of_a_step() -> None:
    """prepare_grads() holds the gradients that step_with_ready_grads() needs."""

    def trained(drop: bool) -> Tensor:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(300).half()) for _ in range(50)]
        optimizer = MixedPrecisionOptimizer(
            torch.optim.SGD(params, lr=1.0), None, DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 10, 1), grads_are_scaled=True
        )
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.prepare_grads()
        if drop:
            optimizer.zero_grad()
            _overwritten = [torch.full((300,), 7.0).half() for _ in range(500)]
        optimizer.step_with_ready_grads()
        return torch.cat(list(params))

    assert bits_equal(trained(False), trained(True))
