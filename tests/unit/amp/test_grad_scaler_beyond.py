"""What GradScaler does beyond torch's: limits, hysteresis, a constant scale, fp16 gradients, no host reads."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from megascale import DynamicGradScaler
from megascale.amp import GradScaler
from megascale.amp.local_grads import LocalGrads
from megascale.errors import ArgumentError, ArgumentTypeError, StateDictError, UsageError
from tests.counting import OperatorCounter
from tests.training import bits_equal

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def _param(grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


def _iterate(scaler: torch.amp.GradScaler, overflow: bool) -> None:
    """One iteration with one gradient element, through an optimizer of its own."""
    optimizer = torch.optim.SGD([_param(torch.tensor([float("inf") if overflow else 1.0]))], lr=0.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()


@settings(max_examples=100, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=25),
    hysteresis=st.integers(1, 3),
    reset=st.sampled_from(["growth", "clean_step"]),
    interval=st.integers(1, 3),
    reload_at=st.integers(0, 25),
)
def test_hysteresis_and_limits_follow_dynamic_grad_scaler(
    overflows: list[bool], hysteresis: int, reset: str, interval: int, reload_at: int
) -> None:
    """Scale and trackers are DynamicGradScaler's at every step, on both resets and limits, also after pickling."""
    ours = GradScaler(
        "cpu",
        8.0,
        growth_interval=interval,
        hysteresis=hysteresis,
        hysteresis_reset=reset,
        min_scale=2.0,
        max_scale=20.0,
    )
    rule = DynamicGradScaler(8.0, 2.0, 2.0, 0.5, interval, hysteresis, max_scale=20.0, hysteresis_reset=reset)
    for step, overflow in enumerate(overflows):
        _iterate(ours, overflow)
        rule.update(overflow)
        if step == reload_at:
            ours = pickle.loads(pickle.dumps(ours))
        state, expected = ours.state_dict(), rule.state_dict()
        assert state["scale"] == expected["scale"].item()
        assert state["_growth_tracker"] == expected["growth_tracker"]
        assert state.get("hysteresis_tracker", 1) == (expected["hysteresis_tracker"] if hysteresis > 1 else 1)


def test_scale_stops_at_the_smallest_that_works() -> None:
    """Down to 2**-126 the scale is torch's; there ours stays and grows again, while torch's falls to 0 for ever."""
    ours, theirs = (
        GradScaler("cpu", 2.0**-120, growth_interval=1),
        torch.amp.GradScaler("cpu", 2.0**-120, growth_interval=1),
    )
    for step in range(40):
        _iterate(ours, True)
        _iterate(theirs, True)
        assert ours.get_scale() == max(2.0 ** (-121 - step), 2.0**-126)
        assert theirs.get_scale() == ours.get_scale() or step >= 6
    assert theirs.get_scale() == 0.0
    for scaler in (ours, theirs):
        _iterate(scaler, False)
    assert (ours.get_scale(), theirs.get_scale()) == (2.0**-125, 0.0)
    assert ours._inv_scale().item() == 2.0**125


def test_a_tracker_above_the_interval_grows_at_the_next_clean_step() -> None:
    """A state dict or a shorter interval may leave more clean steps than needed: ours grows, torch's never does."""
    scales = []
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler = kind("cpu", 4.0, growth_interval=100)
        for _ in range(5):
            _iterate(scaler, False)
        scaler.set_growth_interval(3)
        for _ in range(10):
            _iterate(scaler, False)
        scales.append(scaler.get_scale())
    assert scales == [4.0 * 2**4, 4.0]


def test_constant_loss_scale() -> None:
    """``loss_scale=128`` stays what it is through overflows, which are skipped, and clean steps. It can be set anew."""
    scaler = GradScaler("cpu", growth_interval=1, loss_scale=128)
    param = _param(torch.full((2,), float("inf")))
    optimizer = torch.optim.SGD([param], lr=1.0)
    assert scaler.scale(torch.ones(())).item() == 128.0
    for grad, value in ((float("inf"), 0.0), (64.0, -0.5), (64.0, -1.0)):
        param.grad = torch.full((2,), grad)
        scaler.step(optimizer)
        scaler.update()
        assert param.detach().tolist() == [value] * 2
        assert scaler.get_scale() == 128.0
    scaler.update(2.0)
    _iterate(scaler, False)
    assert scaler.get_scale() == 2.0
    assert GradScaler("cpu", 4.0, loss_scale="dynamic").get_scale() == GradScaler("cpu", 4.0).get_scale() == 4.0


@pytest.mark.parametrize("numel", [2, 80])
def test_a_fused_optimizer_unscales_fp16_gradients_without_loss(numel: int) -> None:
    """Gradients of which nothing is left once unscaled in fp16 still step as in fp32: the kernel divides there."""
    scaled = torch.full((numel,), 2.0**-10)
    assert not (scaled.half() / 2.0**16).any()
    moved = []
    for dtype in (torch.float16, torch.float32):
        param = nn.Parameter(torch.zeros(numel, dtype=dtype))
        param.grad = scaled.to(dtype, copy=True)
        optimizer = torch.optim.AdamW([param], lr=2.0**24, eps=1.0, weight_decay=0.0, fused=True)
        scaler = GradScaler("cpu", 2.0**16)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        moved.append(param.detach().float())
    assert moved[1].tolist() == pytest.approx([-0.25] * numel, rel=1e-5)
    assert moved[0].tolist() == pytest.approx(moved[1].tolist(), rel=2.0**-11)


def test_fp16_gradients_are_unscaled_in_place() -> None:
    """unscale_() takes fp16 gradients, which torch refuses: rounded once, checked, beside fp32 ones."""
    half, full = _param(torch.tensor([3.0, 1e-3]).half()), _param(torch.tensor([3.0, 1e-3]))
    optimizer = torch.optim.SGD([half, full], lr=1.0)
    theirs = torch.amp.GradScaler("cpu", 3.0)
    theirs.scale(torch.ones(()))
    with pytest.raises(ValueError, match="FP16"):
        theirs.unscale_(optimizer)
    scaler = GradScaler("cpu", 3.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    assert half.grad is not None
    assert full.grad is not None
    inv_scale = scaler._inv_scale()
    assert bits_equal(full.grad, torch.tensor([3.0, 1e-3]) * inv_scale)
    assert bits_equal(half.grad, (torch.tensor([3.0, 1e-3]).half().float() * inv_scale).half())
    scaler.step(optimizer)
    scaler.update()
    assert half.detach().tolist() == (-half.grad).tolist()
    half.grad[0] = float("nan")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.5


def test_fp16_gradients_that_overflow_while_unscaled_are_found() -> None:
    """A scale below 1 can push a finite fp16 gradient out of range: the step is skipped, not poisoned."""
    param = _param(torch.tensor([40000.0, 1.0]).half())
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", 0.25)
    for measured in (False, True):
        param.grad = torch.tensor([40000.0, 1.0]).half()
        scaler.scale(torch.ones(()))
        if measured:
            scaler._measure(optimizer, LocalGrads(optimizer))
            assert _found(scaler, optimizer) == 0.0
        scaler.step(optimizer)
        scaler.update()
        assert param.detach().tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 0.0625


def test_duplicates_of_a_sparse_fp16_gradient_that_add_up_to_inf_are_found() -> None:
    """fp16 values of one row are added before they are checked, as they would overflow in the optimizer."""
    table = nn.Parameter(torch.zeros(3, 1, dtype=torch.float16))
    values = torch.tensor([[40000.0], [1.0], [40000.0]]).half()
    table.grad = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), values, (3, 1), check_invariants=True)
    optimizer = torch.optim.SGD([table], lr=1.0)
    scaler = GradScaler("cpu", 4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert table.detach().flatten().tolist() == [0.0, 0.0, 0.0]
    assert scaler.get_scale() == 2.0


FUSED = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
if TorchVersion(torch.__version__) >= "2.13":  # torch 2.11's cannot be told of an overflow
    FUSED["adagrad"] = lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True)


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("fused", FUSED)
def test_fused_optimizers_cost_no_host_read(fused: str, overflow: bool) -> None:
    """With fused=True scale, step and update read nothing on the host, and write no gradient before the update."""
    params = [_param(torch.tensor([1.0, float("inf") if overflow else 2.0])), _param(torch.ones(3))]
    optimizer = FUSED[fused](params)
    scaler = GradScaler("cpu", 4.0, hysteresis=2)
    for _ in range(2):
        scaler.scale(torch.ones(()))
        with OperatorCounter() as counter:
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        assert counter.host_reads == 0
        assert counter.counts[UNSCALE] == 0
    assert bool(params[1].detach().any()) is not overflow
    assert scaler.get_scale() == (2.0 if overflow else 4.0)


@pytest.mark.parametrize(("dampening", "trained"), [(0.0, -7.0), (0.5, -5.0)])
def test_momentum_of_a_skipped_first_step_is_none(dampening: float, trained: float) -> None:
    """A skipped first step leaves it unfilled memory in torch's fused SGD, which the second one reads. The first
    gradient that lands is not dampened.
    """
    for kind in ({"fused": True}, {"foreach": True}):
        param = nn.Parameter(torch.zeros(50_000))
        optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.5, dampening=dampening, **kind)
        scaler = GradScaler("cpu", 1.0)
        for grad in (float("nan"), 2.0, 4.0):
            # Freed memory full of NaN is what an unfilled buffer is made of.
            del [torch.full((50_000,), float("nan")) for _ in range(3)][:]
            param.grad = torch.full((50_000,), grad)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update(1.0)
        assert param.detach().unique().tolist() == [trained]


def _found(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> float:
    [found_inf] = scaler._found_inf_per_device(optimizer).values()
    return found_inf.item()


def test_state_with_hysteresis() -> None:
    """Only a scaler with hysteresis saves its tracker; torch's loads it, and one without ignores it."""
    scaler = GradScaler("cpu", hysteresis=3)
    assert scaler.state_dict()["hysteresis_tracker"] == 3
    _iterate(scaler, True)
    state = scaler.state_dict()
    assert state["hysteresis_tracker"] == 2
    torch.amp.GradScaler("cpu").load_state_dict(state)
    plain = GradScaler("cpu")
    plain.load_state_dict(state)
    assert "hysteresis_tracker" not in plain.state_dict()
    other = GradScaler("cpu", hysteresis=2)
    other.load_state_dict(torch.amp.GradScaler("cpu", 4.0).state_dict())
    assert other.state_dict()["hysteresis_tracker"] == 2
    other.load_state_dict(state | {"hysteresis_tracker": 1})
    _iterate(other, True)
    assert other.get_scale() == 2.0**15
    other.load_state_dict(state)  # in use
    _iterate(other, True)
    assert other.get_scale() == 2.0**16


GOOD = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 3}
LACKS = object()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "'scale' must be above 0"),
        ({"scale": float("inf")}, "'scale' must be finite"),
        ({"scale": 1.0}, "min_scale=2.0"),
        ({"scale": "8"}, "'scale' must be a number"),
        ({"growth_factor": 0.5}, "growth factor must be > 1.0"),
        ({"backoff_factor": 2.0}, "backoff factor must be < 1.0"),
        ({"growth_interval": 0}, "'growth_interval' must be 1 or more"),
        ({"_growth_tracker": -1}, "'_growth_tracker' must be 0 or more"),
        ({"hysteresis_tracker": 0.5}, "'hysteresis_tracker' must be an integer"),
        ({"growth_interval": None}, "'growth_interval' must be an integer"),
        *(({name: LACKS}, f"lacks '{name}'") for name in GOOD),
    ],
)
def test_a_bad_state_changes_nothing(change: dict[str, Any], message: str) -> None:
    """A state that cannot be is refused, naming the entry, before anything has changed."""
    scaler = GradScaler("cpu", 4.0, hysteresis=2, min_scale=2.0)
    _iterate(scaler, False)
    before = scaler.state_dict()
    with pytest.raises(StateDictError, match=message):
        scaler.load_state_dict({name: value for name, value in (GOOD | change).items() if value is not LACKS})
    assert scaler.state_dict() == before


def test_new_scale_within_limits() -> None:
    """A number outside the limits is refused; a tensor is clamped unread, one that is not finite changes nothing."""
    scaler = GradScaler("cpu", 4.0, min_scale=2.0, max_scale=16.0)
    scaler.scale(torch.ones(()))
    for value in (0.0, -1.0, 1.0, 32.0, float("nan"), float("inf"), True):
        with pytest.raises(ArgumentError, match="new_scale"):
            scaler.update(value)
    assert scaler.get_scale() == 4.0
    with OperatorCounter() as counter:
        scaler.update(torch.tensor([[0.5]]))
    assert counter.host_reads == 0
    assert scaler.get_scale() == 2.0
    scaler.update(torch.tensor(100.0, dtype=torch.float64))
    assert scaler.get_scale() == 16.0
    scaler.update(torch.tensor(float("nan")))
    assert scaler.get_scale() == 16.0
    scaler.update(8)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"init_scale": 0.0}, ArgumentError, "init_scale"),
        ({"init_scale": 1.0, "min_scale": 2.0}, ArgumentError, "init_scale must be between min_scale=2.0"),
        ({"loss_scale": 64.0, "max_scale": 32.0}, ArgumentError, "loss_scale must be between"),
        ({"loss_scale": "static"}, ArgumentError, "loss_scale must be 'dynamic'"),
        ({"loss_scale": True}, ArgumentTypeError, "loss_scale"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ArgumentError, "min_scale <= max_scale"),
        ({"min_scale": 2.0**-140}, ArgumentError, "min_scale"),
        ({"hysteresis": 0}, ArgumentError, "hysteresis"),
        ({"hysteresis_reset": "never"}, ArgumentError, "hysteresis_reset"),
        ({"growth_factor": float("nan")}, ArgumentError, "growth_factor"),
        ({"backoff_factor": 0.0}, AssertionError, "backoff_factor"),
        ({"growth_interval": 1.5}, ArgumentTypeError, "growth_interval"),
        ({"process_group": "world"}, ArgumentTypeError, "process_group must be a ProcessGroup"),
        ({"max_consecutive_skips": 0}, ArgumentError, "max_consecutive_skips must be 1 or more, got 0"),
        ({"max_overflows_at_min_scale": 0}, ArgumentError, "max_overflows_at_min_scale must be 1 or more, got 0"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Every argument is checked by name when the scaler is made."""
    with pytest.raises(error, match=message):
        GradScaler("cpu", **options)


def test_a_closure_in_first_place_is_refused() -> None:
    """Where torch runs a positional closure, its gradients are never unscaled. None, as Accelerate passes, is none."""
    param = _param(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(UsageError, match="closure"):
        scaler.step(optimizer, lambda: 1.0)
    scaler.step(optimizer, None)
    assert param.detach().any()


def test_a_step_that_raises_leaves_nothing_on_the_optimizer() -> None:
    """Where a fused step fails, grad_scale and found_inf are gone again, and the step can be repeated."""
    param = _param(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
    scaler = GradScaler("cpu", 2.0)
    scaler.scale(torch.ones(()))
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    handle.remove()
    scaler.step(optimizer)
    scaler.update()
    assert param.detach().tolist() == pytest.approx([-0.05, -0.05])
