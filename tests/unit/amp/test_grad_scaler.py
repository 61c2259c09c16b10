"""GradScaler's surface beside torch's: what it takes, tells, saves and refuses."""

import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megascale.amp import GradScaler
from megascale.errors import MinScaleError, SkippedStepsError
from tests.training import bits_equal

Scaler = torch.amp.GradScaler

BOTH: list[type[Scaler]] = [GradScaler, torch.amp.GradScaler]


@pytest.mark.parametrize("kind", BOTH)
def test_scale_of_nested_outputs(kind: type[Scaler]) -> None:
    """Nested lists and tuples keep their shape, any other iterable becomes a lazy one, on whatever devices they are."""
    scaler = kind("cpu", init_scale=2.0)
    four = torch.full((1,), 4.0)
    scaled: Any = scaler.scale([four, (four, [four.half(), four.to("meta")]), ()])  # type: ignore[list-item]
    assert type(scaled) is list
    assert type(scaled[1]) is tuple
    assert type(scaled[1][1]) is list
    assert scaled[0].item() == scaled[1][0].item() == scaled[1][1][0].item() == 8.0
    assert scaled[1][1][0].dtype == torch.float16
    assert scaled[1][1][1].device.type == "meta"
    lazy = scaler.scale(x for x in [four, four])
    assert [x.item() for x in lazy] == [8.0, 8.0]
    assert scaler.scale(torch.tensor(40000.0, dtype=torch.float16)).item() == 80000.0  # a 0-d fp16 loss becomes fp32
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(4.0)  # type: ignore[call-overload]
    disabled = kind("cpu", enabled=False)
    assert disabled.scale(four) is four


def _embedding_steps(kind: type[Scaler], dtype: torch.dtype, values: list[float]) -> list[Any]:
    scaler = kind("cpu", init_scale=4.0, growth_interval=2)
    table = nn.Parameter(torch.zeros(4, 2, dtype=dtype))
    optimizer = torch.optim.SGD([table], lr=1.0)
    trace: list[Any] = []
    for value in values:
        scaler.scale(torch.ones(()))
        rows = torch.tensor([[1.0, 2.0], [value, 1.0], [4.0, 8.0]], dtype=dtype)
        table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3, 1]]), rows, (4, 2), check_invariants=True)
        scaler.unscale_(optimizer)
        trace.append(table.grad.to_dense())
        scaler.step(optimizer)
        scaler.update()
        trace += [table.detach().clone(), scaler.get_scale()]
    return trace


def test_sparse_gradients_as_torch() -> None:
    """Values of sparse fp32 gradients are unscaled and checked; duplicates stay for the optimizer to add up."""
    values = [16.0, float("inf"), 32.0, float("nan"), 1.0]
    ours, theirs = (_embedding_steps(kind, torch.float32, values) for kind in BOTH)
    for left, right in zip(ours, theirs, strict=True):
        assert bits_equal(left, right) if isinstance(left, torch.Tensor) else left == right
    assert ours[2::3] == [4.0, 2.0, 2.0, 1.0, 1.0]


class _TakesScaler(torch.optim.Optimizer):
    """An optimizer of the older contract: it asks the scaler it is handed, as apex's capturable ones do."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.calls: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        """Note what the scaler says."""
        found = grad_scaler._check_inf_per_device(self)
        self.calls.append(
            (isinstance(grad_scaler, torch.amp.GradScaler), hasattr(self, "grad_scale"), hasattr(self, "found_inf"))
        )
        self.calls += [found[torch.device("cpu")].item(), grad_scaler._get_scale_async().item()]
        assert grad_scaler._found_inf_per_device(self) == found


class _TakesTensors(torch.optim.Optimizer):
    """An optimizer of the present contract: two tensors are hung on it for the time of a step."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.calls: list[Any] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Note what hangs there."""
        told: Any = self
        self.calls.append((None if told.grad_scale is None else told.grad_scale.item(), told.found_inf.item()))


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("kind", BOTH)
def test_what_optimizers_that_scale_by_themselves_are_told(kind: type[Scaler]) -> None:
    """Both contracts of ``_step_supports_amp_scaling`` hold, with the user's own grad_scale multiplied in."""
    param = nn.Parameter(torch.zeros(2))
    older, newer = _TakesScaler([param]), _TakesTensors([param])
    scaler = kind("cpu", init_scale=8.0)
    param.grad = torch.tensor([1.0, float("nan")])
    scaler.scale(torch.ones(()))
    scaler.step(older)
    assert older.calls == [(True, False, False), 1.0, 8.0]
    scaler.step(newer)
    scaler.update()
    param.grad = torch.ones(2)
    newer.grad_scale = torch.tensor(0.5)  # type: ignore[attr-defined]
    scaler.step(newer)
    assert not hasattr(newer, "grad_scale")
    assert not hasattr(newer, "found_inf")
    scaler.update()
    scaler.unscale_(newer)
    scaler.step(newer)
    assert newer.calls == [(8.0, 1.0), (4.0 * 0.5, 0.0), (None, 0.0)]


def _misuses() -> dict[str, tuple[type[Exception], str, Callable[[Scaler, torch.optim.Optimizer], object]]]:
    def ready(scaler: Scaler) -> Scaler:
        scaler.scale(torch.ones(()))
        return scaler

    def twice(call: str) -> Callable[[Scaler, torch.optim.Optimizer], object]:
        def run(scaler: Scaler, optimizer: torch.optim.Optimizer) -> None:
            getattr(ready(scaler), call)(optimizer)
            getattr(scaler, call)(optimizer)

        return run

    def unscale_after_step(scaler: Scaler, optimizer: torch.optim.Optimizer) -> None:
        ready(scaler).step(optimizer)
        scaler.unscale_(optimizer)

    def no_grads(scaler: Scaler, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        ready(scaler).step(optimizer)

    def pickled_inside(scaler: Scaler, optimizer: torch.optim.Optimizer) -> None:
        ready(scaler).step(optimizer)
        pickle.dumps(scaler)

    never = "This may indicate your script did not use scaler.scale"
    grads = torch.ones(1, requires_grad=True)
    return {
        "unscale before scale": (AssertionError, f"Attempted unscale_ but _scale is None.*{never}", Scaler.unscale_),
        "step before scale": (AssertionError, f"Attempted step but _scale is None.*{never}", lambda s, o: s.step(o)),
        "update before scale": (
            AssertionError,
            f"Attempted update but _scale is None.*{never}",
            lambda s, _: s.update(),
        ),
        "unscale twice": (RuntimeError, "unscale_.. has already been called on this optimizer", twice("unscale_")),
        "step twice": (RuntimeError, "step.. has already been called since the last update", twice("step")),
        "unscale after step": (RuntimeError, "unscale_.. is being called after step..", unscale_after_step),
        "no checks": (AssertionError, "No inf checks were recorded prior to update.", lambda s, _: ready(s).update()),
        "no gradients": (AssertionError, "No inf checks were recorded for this optimizer", no_grads),
        "closure": (RuntimeError, "closure", lambda s, o: ready(s).step(o, closure=lambda: 1.0)),
        "new scale requires grad": (AssertionError, "new_scale should be a float", lambda s, _: ready(s).update(grads)),
        "two new scales": (AssertionError, "new_scale should be", lambda s, _: ready(s).update(torch.ones(2))),
        "elsewhere": (AssertionError, "new_scale", lambda s, _: ready(s).update(torch.ones(1, device="meta"))),
        "pickle inside": (AssertionError, "may only be pickled at the beginning of an iteration", pickled_inside),
        "empty state": (RuntimeError, "The source state dict is empty", lambda s, _: s.load_state_dict({})),
    }


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("misuse", _misuses())
def test_misuse_raises_as_torch_does(misuse: str, kind: type[Scaler]) -> None:
    """Calls in the wrong order, or with what cannot be, raise torch's type of error and say torch's words."""
    error, message, call = _misuses()[misuse]
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    with pytest.raises(error, match="(?is)" + message):
        call(kind("cpu"), torch.optim.SGD([param], lr=0.1))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("factors", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_factors_that_do_nothing_are_refused_as_torch_does(kind: type[Scaler], factors: dict[str, float]) -> None:
    """A growth factor of at most 1 and a backoff factor of at least 1 are AssertionErrors; not if disabled."""
    with pytest.raises(AssertionError, match="factor must be"):
        kind("cpu", **factors)  # type: ignore[arg-type]
    kind("cpu", enabled=False, **factors)  # type: ignore[arg-type]


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("pair", [(0, 1), (1, 0)], ids=["ours from torch", "torch from ours"])
def test_state_travels_between_ours_and_torchs(pair: tuple[int, int], used: bool) -> None:
    """Either loads the other's state dict, before or after first use, and goes on from the same scale and tracker."""
    source, target = BOTH[pair[0]]("cpu", 512.0, 3.0, 0.25, 7), BOTH[pair[1]]("cpu", 2.0, 2.0, 0.5, 3)
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for scaler in (source, target) if used else (source,):
        scaler.scale(torch.ones(()))
        param.grad = torch.ones(2)
        scaler.step(optimizer)
        scaler.update()
    state = source.state_dict()
    assert list(state) == ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
    assert [type(value) for value in state.values()] == [float, float, float, int, int]
    target.load_state_dict(state)
    assert target.state_dict() == state
    for _ in range(6):
        target.scale(torch.ones(()))
        param.grad = torch.ones(2)
        target.step(optimizer)
        target.update()
    assert target.get_scale() == 512.0 * 3.0


@pytest.mark.parametrize("kind", BOTH)
def test_disabled_does_nothing(kind: type[Scaler]) -> None:
    """A disabled scaler passes losses and steps through, closure and all, and has an empty state."""
    scaler = kind("cpu", enabled=False)
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5)
    param.grad = torch.ones(2)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 3.0) == 3.0
    scaler.update()
    scaler.load_state_dict({})
    assert param.detach().tolist() == [0.5, 0.5]
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


@pytest.mark.parametrize("kind", BOTH)
def test_defaults(kind: type[Scaler]) -> None:
    """The defaults are torch's; "cuda" is one of them, and without CUDA the scaler warns and is disabled."""
    scaler = kind("cpu")
    assert scaler.state_dict() == {
        "scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available") as caught:
            assert not kind().is_enabled()
        assert caught[0].filename == __file__


def _step(layer: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, factor: float) -> None:
    optimizer.zero_grad()
    scaler.scale(layer(torch.ones(1, 3)).sum()).backward(torch.tensor(factor))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_more_skips_in_a_row_than_are_allowed(fused: bool) -> None:
    """An error after the scale has moved, and at each further skip; it names the worst parameter. A clean step begins
    the count anew. A copy has the budget, too.
    """
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.named_parameters(), fused=fused)
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", init_scale=2.0**10, max_consecutive_skips=2)))
    step = partial(_step, layer, optimizer, scaler)
    for factor in (math.inf, math.inf, 1.0, math.inf, math.inf):
        step(factor)
    for count in (3, 4):
        with pytest.raises(SkippedStepsError, match=rf"^{count} steps .* allows 2: .* inf or NaN: 'weight' \(6 of"):
            step(math.inf)
    assert scaler.get_scale() == 2.0**4
    step(1.0)


@pytest.mark.parametrize("constant", [False, True])
def test_more_overflows_at_the_smallest_scale_than_are_allowed(constant: bool) -> None:
    """Steps above it are not counted, and a clean step begins anew. A constant scale is no minimum."""
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.named_parameters())
    made = GradScaler(
        "cpu", 4.0, min_scale=2.0, loss_scale=2.0 if constant else None, hysteresis=2, max_overflows_at_min_scale=2
    )
    scaler = pickle.loads(pickle.dumps(made))
    step = partial(_step, layer, optimizer, scaler)
    for factor in (math.inf, math.inf, math.inf, math.inf, 1.0, math.inf, math.inf):
        step(factor)
    if constant:
        step(math.inf)
        return
    for count in (3, 4):
        with pytest.raises(MinScaleError, match=rf"^{count} steps .* scale, 2.0, .* allows 2: .*: 'weight' \(6 of"):
            step(math.inf)
    step(1.0)
