"""What listens to a step: told once of each, in order, after it was decided on, and before anything has changed."""

import pytest
import torch
from torch import Tensor, nn

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.errors import UsageError
from megascale.step.misuse import Statistics, was_skipped
from megascale.step.observers import StepObserver, StepRecord


class Listener(StepObserver):
    """Notes what it is told, and the weights at that moment."""

    def __init__(self, param: nn.Parameter, error: Exception | None = None) -> None:
        self.param, self.error = param, error
        self.told: list[tuple[StepRecord, bool, float, Tensor]] = []
        self.times_anew = 0

    def on_step(self, agreed: Statistics | None, record: StepRecord) -> None:
        """See the class."""
        assert agreed is not None
        assert record.scaler is not None
        scale = record.scaler.live_scale.tolist()[0]
        self.told.append((record, was_skipped(agreed), scale, self.param.detach().clone()))
        if self.error is not None:
            raise self.error

    def reset(self) -> None:
        """See the class."""
        self.times_anew += 1


def _wrapped(scaler: DynamicGradScaler) -> tuple[nn.Parameter, MixedPrecisionOptimizer]:
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    return param, MixedPrecisionOptimizer(torch.optim.AdamW([(f"p{id(param)}", param)], lr=0.5), None, scaler)


def _scaler() -> DynamicGradScaler:
    return DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 1, 1)


def _backward(optimizer: MixedPrecisionOptimizer | ChainedOptimizer, factor: float, *params: nn.Parameter) -> None:
    optimizer.zero_grad()
    optimizer.scale_loss(sum((param.float() * factor).sum() for param in params) + torch.zeros(())).backward()


def test_observers_are_told_before_anything_changes() -> None:
    """Clean steps and skipped ones, once each, with the scale and the weights of before the step."""
    param, optimizer = _wrapped(_scaler())
    listener = Listener(param)
    optimizer.recipe.observers.append(listener)
    before, scales = [], []
    for factor in (1.0, torch.inf, 1.0):
        _backward(optimizer, factor, param)
        before.append(param.detach().clone())
        scales.append(optimizer.get_loss_scale().item())
        optimizer.step()
    records, skipped, told_scales, weights = zip(*listener.told, strict=True)
    assert skipped == (False, True, False)
    assert [bool(record.found_inf) for record in records] == [False, True, False]
    assert [record.step for record in records] == [0, 1, 2]
    assert list(told_scales) == scales == [16.0, 32.0, 16.0]
    assert all(map(torch.equal, weights, before))
    optimizer.reload_model_params()
    assert listener.times_anew == 1


def test_what_an_observer_raises_ends_the_step() -> None:
    """Nothing has changed then: neither weights nor scale. Observers after it are not told."""
    param, optimizer = _wrapped(_scaler())
    failing, later = Listener(param, UsageError("enough")), Listener(param)
    optimizer.recipe.observers += [failing, later]
    _backward(optimizer, 1.0, param)
    with pytest.raises(UsageError, match="enough"):
        optimizer.step()
    assert (param == 1).all()
    assert optimizer.get_loss_scale().item() == 16.0
    assert (len(failing.told), later.told) == (1, [])
