"""GradScaler beside torch's: the grad-scaling cases of torch's own test suite as behaviours, and the same bits."""

import copy
import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megascale.amp import GradScaler
from tests.training import bits_equal

Scaler = torch.amp.GradScaler
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Scenario = Callable[[Scaler, Optimizers], Iterator[Any]]

BOTH: list[type[Scaler]] = [GradScaler, torch.amp.GradScaler]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9),
    "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9, fused=True),
    "adam_loop": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=False),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "adagrad_fused": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1),
}
OVERFLOW_AT = 2
STEPS = 6


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _batches() -> Iterator[tuple[int, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        yield step, torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def _poison(model: nn.Sequential, value: float = float("inf")) -> None:
    weight = model[1].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    weight.grad[0, 0] = value


def _seen(scaler: Scaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of everything that a scaler can change."""
    seen: dict[str, Any] = dict(scaler.state_dict())
    for name, param in model.named_parameters():
        seen[name] = param.detach().clone()
        seen[f"{name}.grad"] = None if param.grad is None else param.grad.clone()
        for key, value in optimizer.state[param].items():
            seen[f"{name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
    return seen


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return bits_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


def _typical(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        if step == OVERFLOW_AT:
            _poison(model)
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _unscaled_apart(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        if step == OVERFLOW_AT:
            _poison(model, float("nan"))
        scaler.unscale_(optimizer)
        yield _seen(scaler, model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _clipped_by_norm(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        if step == OVERFLOW_AT:
            _poison(model)
        scaler.unscale_(optimizer)
        yield nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _clipped_while_scaled(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for _, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _clipped_by_value(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        if step == OVERFLOW_AT:
            _poison(model)  # which the clamp hides; the scaler has seen it before
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _accumulated(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        scaler.scale(_loss(model, x, y) / 2).backward()
        if step % 2 == 1:
            if step == OVERFLOW_AT + 1:
                _poison(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        yield _seen(scaler, model, optimizer)


def _penalised(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        loss = _loss(model, x, y)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        grads = [grad * (1.0 / scaler.get_scale()) for grad in scaled]
        penalty = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        scaler.scale(loss + penalty).backward()
        if step == OVERFLOW_AT:
            _poison(model)
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _grads_with_graph(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for _, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward(create_graph=True)
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _two_of_each(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    first, second = _model(0), _model(1)
    pair = [optimizers(first), optimizers(second)]
    for step, x, y in _batches():
        for optimizer in pair:
            optimizer.zero_grad()
        one, two = first(x), second(x)
        losses = [nn.functional.mse_loss(2 * one + 3 * two, y), nn.functional.mse_loss(3 * one - 5 * two, y)]
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        if step == OVERFLOW_AT:
            _poison(second)  # the other optimizer still steps
        scaler.unscale_(pair[0])
        for optimizer in pair:
            scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, first, pair[0])
        yield _seen(scaler, second, pair[1])


def _new_scales(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update(
            [None, 3.0, torch.tensor(5.5), torch.tensor(7.25), None, torch.tensor(2, dtype=torch.int64)][step]
        )
        yield _seen(scaler, model, optimizer)


def _changed_settings(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        if step == 3:
            _poison(model)
            scaler.set_growth_factor(3.7)
            scaler.set_backoff_factor(0.3)
            scaler.set_growth_interval(1)
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        yield _seen(scaler, model, optimizer)


def _travelled(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        if step == OVERFLOW_AT:
            _poison(model)
        scaler.step(optimizer)
        scaler.update()
        scaler = pickle.loads(pickle.dumps(scaler)) if step % 2 else copy.deepcopy(scaler)
        yield _seen(scaler, model, optimizer)


def _spoiled_after_unscaling(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for _, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        scaler.unscale_(optimizer)
        _poison(model)  # nobody looks any more: the user has taken over
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _some_without_gradient(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        if step % 2:
            model[0].bias.grad = None
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _autocast(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16 if step % 2 else torch.bfloat16):
            output = model(x)
            loss = nn.functional.mse_loss(output, y.to(output.dtype))
        scaler.scale(loss).backward()
        if step == OVERFLOW_AT:
            _poison(model)
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


def _strided(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    model = _model()
    optimizer = optimizers(model)
    for step, x, y in _batches():
        optimizer.zero_grad()
        scaler.scale(_loss(model, x, y)).backward()
        for layer in model:
            weight = layer.weight
            assert isinstance(weight, nn.Parameter)
            assert weight.grad is not None
            weight.grad = weight.grad.t().contiguous().t()
        if step == OVERFLOW_AT:
            _poison(model)
        scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, model, optimizer)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__.strip("_"): scenario
    for scenario in (
        _typical,
        _unscaled_apart,
        _clipped_by_norm,
        _clipped_while_scaled,
        _clipped_by_value,
        _accumulated,
        _penalised,
        _grads_with_graph,
        _two_of_each,
        _new_scales,
        _changed_settings,
        _travelled,
        _spoiled_after_unscaling,
        _some_without_gradient,
        _autocast,
        _strided,
    )
}


# A disabled scaler has no scale and no settings.
CASES = [(name, True) for name in SCENARIOS] + [
    (name, False) for name in sorted(SCENARIOS.keys() - {"new_scales", "changed_settings"})
]


@pytest.mark.default("case199-adamw_foreach", "case120-sgd_fused", "case5-adagrad_fused", "case0-sgd")
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(("case", "optimizer"), list(product(CASES, OPTIMIZERS)))
def test_same_bits_as_torch(case: tuple[str, bool], optimizer: str) -> None:
    """Every training pattern of the torch.amp examples gives torch's bits: params, gradients, state, scale, tracker."""
    scenario, enabled = case
    traces = []
    for kind in BOTH:
        scaler = kind(
            "cpu", init_scale=128.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2, enabled=enabled
        )
        traces.append(list(SCENARIOS[scenario](scaler, OPTIMIZERS[optimizer])))
    ours, theirs = traces
    assert len(ours) == len(theirs) >= STEPS
    for place, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert _same(left, right), f"differs at {place}: {left} != {right}"


def test_a_skip_changes_nothing_and_is_seen() -> None:
    """The scenarios do overflow: the poisoned step leaves every parameter alone, and its neighbours do not."""
    for optimizer in ("adamw_foreach", "adamw_fused"):
        seen = list(_typical(GradScaler("cpu", init_scale=128.0, growth_interval=100), OPTIMIZERS[optimizer]))
        moved = [not bits_equal(a["0.weight"], b["0.weight"]) for a, b in pairwise(seen)]
        assert moved == [True, False, True, True, True]
        assert [step["scale"] for step in seen] == [128.0, 128.0, 64.0, 64.0, 64.0, 64.0]


STEP = st.fixed_dictionaries(
    {
        "poison": st.tuples(*[st.sampled_from([None, None, None, float("inf"), float("-inf"), float("nan")])] * 2),
        "unscale": st.tuples(st.booleans(), st.booleans()),
        "take": st.sampled_from([(0, 1), (1, 0), (0,), (1,)]),
        "new_scale": st.sampled_from([None, None, None, None, 0.75, 2.0**20]),
    }
)


def _schedule(kind: type[Scaler], settings: dict[str, Any], steps: list[dict[str, Any]]) -> list[Any]:
    scaler = kind("cpu", **settings)
    params = [nn.Parameter(torch.linspace(-1, 1, 5)), nn.Parameter(torch.linspace(1, 2, 3))]
    pair: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([params[0]], lr=0.1),
        # Without momentum: after a skipped first step torch's fused SGD reads memory that nobody has filled.
        torch.optim.SGD([params[1]], lr=0.1, weight_decay=0.1, fused=True),
    ]
    generator = torch.Generator().manual_seed(0)
    trace: list[Any] = []
    for step in steps:
        scaler.scale(torch.ones(()))
        for index in step["take"]:
            params[index].grad = torch.randn(params[index].shape, generator=generator) * 100
            if step["poison"][index] is not None:
                params[index].grad[-1] = step["poison"][index]
            if step["unscale"][index]:
                scaler.unscale_(pair[index])
            scaler.step(pair[index])
        scaler.update(step["new_scale"])
        trace.append({**scaler.state_dict(), **{str(i): param.detach().clone() for i, param in enumerate(params)}})
    return trace


ANY_SCHEDULE = given(
    init_scale=st.sampled_from([1.0, 2.0**16, 1.3, 2.0**127, 2.0**-100]),
    growth_factor=st.sampled_from([2.0, 1.7, 1.001, 3.3]),
    backoff_factor=st.sampled_from([0.5, 0.3, 0.9]),
    growth_interval=st.integers(1, 4),
    steps=st.lists(STEP, min_size=1, max_size=20),
)


def _check_schedule(steps: list[dict[str, Any]], **settings: Any) -> None:
    ours = _schedule(GradScaler, settings, steps)
    theirs = _schedule(torch.amp.GradScaler, settings, steps)
    assert all(_same(left, right) for left, right in zip(ours, theirs, strict=True)), (ours, theirs)


@settings(max_examples=40, deadline=None)
@ANY_SCHEDULE
def test_any_schedule_gives_torchs_bits(steps: list[dict[str, Any]], **settings: Any) -> None:
    """Two optimizers, inf and NaN at random, unscaled apart or not, new scales, odd factors: torch's bits."""
    _check_schedule(steps, **settings)


@pytest.mark.release
@settings(max_examples=1000, deadline=None)
@ANY_SCHEDULE
def test_many_schedules_give_torchs_bits(steps: list[dict[str, Any]], **settings: Any) -> None:
    """The same, for more of them."""
    _check_schedule(steps, **settings)
