"""What others do to tensors between steps is followed; what the step itself does is not taken for theirs."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer
from megascale.kernels import ListReader
from megascale.main_params.main_param import MainParam


def test_a_reader_lets_go_of_gradients() -> None:
    """What is remembered of a step's gradients keeps none of them alive."""
    reader = ListReader()
    gone: list[weakref.ref[Tensor]] = []
    for _ in range(4):
        grads = [torch.ones(3) for _ in range(5)]
        assert reader.read(grads) is not None
        gone += map(weakref.ref, grads)
        del grads
    assert all(reference() is None for reference in gone)


def test_gradients_that_no_longer_fit_are_found() -> None:
    """A gradient that becomes one of another kind, or of other memory, is looked at again; one that stays is not."""
    grads, reader = [torch.ones(3) for _ in range(5)], ListReader()

    def fit() -> bool:
        return reader.read(grads) is not None

    assert [fit(), fit()] == [True, True]
    grads[2] = torch._neg_view(torch.ones(3))
    assert [fit(), fit()] == [False, False]
    grads[2] = torch.ones(3)
    assert fit()
    grads[2] = torch.ones(9)[6:]
    assert fit()
    grads[2].untyped_storage().resize_(32)
    assert not fit()
    grads[2] = torch.ones(3)
    assert fit()
    grads[2].untyped_storage().resize_(0)
    assert not fit()


@pytest.mark.parametrize("odd", [False, True])
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
