"""GradScaler beside torch's: the grad-scaling cases of torch's own test suite as behaviours, and the same bits."""

import copy
import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megascale.amp import GradScaler
from tests.training import bits_equal, same_values

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


class _Run:
    """A training loop of some steps, the third of which overflows: what a scenario's functions may look at."""

    def __init__(self, scaler: Scaler, optimizers: Optimizers) -> None:
        self.scaler, self.model = scaler, _model()
        self.optimizer = optimizers(self.model)
        self.step = 0

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def seen(self) -> dict[str, Any]:
        return _seen(self.scaler, self.model, self.optimizer)


def _backward(run: _Run, x: Tensor, y: Tensor) -> None:
    run.scaler.scale(_loss(run.model, x, y)).backward()


def _update(run: _Run) -> None:
    run.scaler.update()


def _scenario(
    ready: Callable[[_Run], Any] = lambda run: None,
    backward: Callable[[_Run, Tensor, Tensor], object] = _backward,
    poison: float | None = float("inf"),
    update: Callable[[_Run], object] = _update,
) -> Scenario:
    """Return a loop.

    Args:
        ready: what the program does between backward and step; what it returns is compared.
        backward: with which inputs and targets.
        poison: a gradient of the third step, before ``ready``; None: no step overflows by itself.
        update: what the program does after the step.
    """

    def loop(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
        run = _Run(scaler, optimizers)
        for run.step, x, y in _batches():
            run.optimizer.zero_grad()
            backward(run, x, y)
            if run.step == OVERFLOW_AT and poison is not None:
                _poison(run.model, poison)
            yield ready(run)
            run.scaler.step(run.optimizer)
            update(run)
            yield run.seen()

    return loop


def _unscale(run: _Run) -> dict[str, Any]:
    run.unscale()
    return run.seen()


def _clip_by_norm(run: _Run) -> Tensor:
    run.unscale()
    return nn.utils.clip_grad_norm_(run.model.parameters(), 0.2)


def _clip_while_scaled(run: _Run) -> Tensor:
    return nn.utils.clip_grad_norm_(run.model.parameters(), 0.2 * run.scaler.get_scale())


def _clip_by_value(run: _Run) -> None:
    """The clamp hides an inf; the scaler has seen it before."""
    run.unscale()
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


def _accumulate(run: _Run, x: Tensor, y: Tensor) -> None:
    for rows in (slice(0, 4), slice(4, 8)):
        run.scaler.scale(_loss(run.model, x[rows], y[rows]) / 2).backward()


def _penalise(run: _Run, x: Tensor, y: Tensor) -> None:
    loss = _loss(run.model, x, y)
    scaled = torch.autograd.grad(run.scaler.scale(loss), list(run.model.parameters()), create_graph=True)
    grads = [grad * (1.0 / run.scaler.get_scale()) for grad in scaled]
    run.scaler.scale(loss + torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()).backward()


def _with_graph(run: _Run, x: Tensor, y: Tensor) -> None:
    run.scaler.scale(_loss(run.model, x, y)).backward(create_graph=True)


def _new_scale(run: _Run) -> None:
    scales = [None, 3.0, torch.tensor(5.5), torch.tensor(7.25), None, torch.tensor(2, dtype=torch.int64)]
    run.scaler.update(scales[run.step])


def _change_settings(run: _Run) -> tuple[float, float, int]:
    scaler = run.scaler
    if run.step == OVERFLOW_AT:
        scaler.set_growth_factor(3.7)
        scaler.set_backoff_factor(0.3)
        scaler.set_growth_interval(1)
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


def _travel(run: _Run) -> None:
    run.scaler.update()
    run.scaler = pickle.loads(pickle.dumps(run.scaler)) if run.step % 2 else copy.deepcopy(run.scaler)


def _spoil_after_unscaling(run: _Run) -> None:
    """Nobody looks any more: the user has taken over."""
    run.unscale()
    _poison(run.model)


def _some_without_gradient(run: _Run) -> None:
    if run.step % 2:
        run.model[0].bias.grad = None


def _under_autocast(run: _Run, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.float16 if run.step % 2 else torch.bfloat16):
        output = run.model(x)
        loss = nn.functional.mse_loss(output, y.to(output.dtype))
    run.scaler.scale(loss).backward()


def _strided(run: _Run, x: Tensor, y: Tensor) -> None:
    _backward(run, x, y)
    for layer in run.model:
        weight: Any = layer.weight
        weight.grad = weight.grad.t().contiguous().t()


def _two_of_each(scaler: Scaler, optimizers: Optimizers) -> Iterator[Any]:
    """Two models, losses and optimizers, of which one alone overflows, and one is unscaled apart."""
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
            _poison(second)
        scaler.unscale_(pair[0])
        for optimizer in pair:
            scaler.step(optimizer)
        scaler.update()
        yield _seen(scaler, first, pair[0])
        yield _seen(scaler, second, pair[1])


SCENARIOS: dict[str, Scenario] = {
    "typical": _scenario(),
    "unscaled_apart": _scenario(_unscale, poison=float("nan")),
    "clipped_by_norm": _scenario(_clip_by_norm),
    "clipped_while_scaled": _scenario(_clip_while_scaled, poison=None),
    "clipped_by_value": _scenario(_clip_by_value),
    "accumulated": _scenario(backward=_accumulate),
    "penalised": _scenario(backward=_penalise),
    "gradients_with_graph": _scenario(backward=_with_graph, poison=None),
    "two_of_each": _two_of_each,
    "new_scales": _scenario(update=_new_scale, poison=None),
    "changed_settings": _scenario(_change_settings),
    "travelled": _scenario(update=_travel),
    "spoiled_after_unscaling": _scenario(_spoil_after_unscaling, poison=None),
    "some_without_gradient": _scenario(_some_without_gradient, poison=None),
    "autocast": _scenario(backward=_under_autocast),
    "strided": _scenario(backward=_strided),
}


KINDS = ("sgd", "sgd_fused", "adamw_foreach", "adamw_fused")
"""Of optimizers that differ for a scaler: does its own skip, or not; in a loop over tensors, or not."""
# A disabled scaler does nothing, has no scale and no settings.
CASES = [
    *((name, kind, True) for name in SCENARIOS for kind in (OPTIMIZERS if name == "typical" else KINDS)),
    *((name, "sgd", False) for name in SCENARIOS if name not in ("new_scales", "changed_settings")),
]


@pytest.mark.default(
    "some_without_gradient-adamw_foreach-True",
    "clipped_by_value-sgd_fused-True",
    "typical-adagrad_fused-True",
    "typical-sgd-False",
)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(("scenario", "optimizer", "enabled"), CASES)
def test_same_bits_as_torch(scenario: str, optimizer: str, enabled: bool) -> None:
    """Every training pattern of the torch.amp examples gives torch's bits: params, gradients, state, scale, tracker."""
    options: dict[str, Any] = {"init_scale": 128.0, "backoff_factor": 0.25, "growth_interval": 2, "enabled": enabled}
    traces = [list(SCENARIOS[scenario](kind("cpu", **options), OPTIMIZERS[optimizer])) for kind in BOTH]
    ours, theirs = traces
    assert len(ours) == len(theirs) >= STEPS
    for place, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert same_values(left, right), f"differs at {place}: {left} != {right}"


def test_a_skip_changes_nothing_and_is_seen() -> None:
    """The scenarios do overflow: the poisoned step leaves every parameter alone, and its neighbours do not."""
    for optimizer in ("adamw_foreach", "adamw_fused"):
        scaler = GradScaler("cpu", init_scale=128.0, growth_interval=100)
        seen = list(SCENARIOS["typical"](scaler, OPTIMIZERS[optimizer]))[1::2]
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
    assert all(same_values(left, right) for left, right in zip(ours, theirs, strict=True)), (ours, theirs)


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
