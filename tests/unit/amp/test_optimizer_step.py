"""optimizer_step: the order is right, the passes are few, and whatever steps, it equals the loop written out."""

import copy
import math
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megascale import (
    ChainedOptimizer,
    ConstantGradScaler,
    DistributedOptimizer,
    DynamicGradScaler,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    StepResult,
)
from megascale.amp import GradScaler, optimizer_step
from megascale.errors import ArgumentError, ArgumentTypeError, GradientError, UsageError
from tests.counting import OperatorCounter
from tests.training import INNER, Bag, Inner, Sign, Tiny, bits_equal, grad_of, model, same_bits, snapshot

Optimizer = torch.optim.Optimizer
KINDS: dict[str, Inner] = {
    name: INNER[name] for name in ("adamw_fused", "adamw_foreach", "sgd", "sgd_momentum_fused")
} | {"own": lambda m: Sign(m.parameters())}
FUSED = [name for name in KINDS if name.endswith("fused")]
CLIPPINGS = {"none": (None, None), "norm": (0.5, None), "value": (None, 0.02), "both": (0.5, 0.02), "loose": (1e6, 1e6)}
OVERFLOWS = (2, 5)
STEPS = 9
UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


class Trace(NamedTuple):
    """Of every step whether it landed, its norm and the next scale; and the parameters at the end."""

    success: list[bool]
    norms: list[float]
    scales: list[float]
    params: list[Tensor]


def _loss(module: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    """Return a loss whose gradients have a norm around 1; at OVERFLOWS a NaN or an inf."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rows]
    loss: Tensor = module(x.to(next(module.parameters()).dtype)).float().square().mean()
    return loss * (math.nan if step == OVERFLOWS[0] else math.inf) if step in OVERFLOWS else loss


def _looped(inner: Inner, norm: float | None, value: float | None, scaler: torch.amp.GradScaler) -> Trace:
    """Return what torch's loop, written out, does to a Tiny model."""
    module = model(torch.float32)
    optimizer = inner(module)
    trace = Trace([], [], [], list(module.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(_loss(module, step)).backward()
        scaler.unscale_(optimizer)
        total = torch.nn.utils.clip_grad_norm_(module.parameters(), norm or math.inf)
        if value is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), value)
        scaler.step(optimizer)
        scaler.update()
        _note(trace, StepResult(total.isfinite(), total, total), scaler.get_scale())
    return trace


def _helped(inner: Inner, norm: float | None, value: float | None, scaler: GradScaler | None) -> Trace:
    """Return what optimizer_step does to the same model."""
    module = model(torch.float32)
    optimizer = inner(module)
    trace = Trace([], [], [], list(module.parameters()))
    for step in range(STEPS):
        result = optimizer_step(_loss(module, step), optimizer, scaler, norm, value)
        _note(trace, result, 1.0 if scaler is None else scaler.get_scale())
    return trace


def _note(trace: Trace, result: StepResult, scale: float) -> None:
    trace.success.append(bool(result.success))
    trace.norms.append(result.grad_norm.item())
    trace.scales.append(scale)


def _torchs() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)


def _ours(**options: Any) -> GradScaler:
    return GradScaler("cpu", **({"init_scale": 2.0**12, "growth_interval": 3} | options))


def _check_same(ours: Trace, theirs: Trace, *, bitwise: bool) -> None:
    assert ours.success == theirs.success == [step not in OVERFLOWS for step in range(STEPS)]
    assert ours.scales == theirs.scales
    landed = [step for step in range(STEPS) if step not in OVERFLOWS]
    assert [ours.norms[i] for i in landed] == pytest.approx([theirs.norms[i] for i in landed], rel=1e-5)
    for mine, other in zip(ours.params, theirs.params, strict=True):
        if bitwise:
            assert bits_equal(mine, other)
        else:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.default("sgd_momentum_fused-value", "sgd-none", "adamw_fused-norm", "adamw_foreach-both")
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_torchs_loop(kind: str, clipping: str) -> None:
    """Nine steps, two overflows: skips and scales equal torch's loop; parameters bitwise where nothing is clipped.

    Clipped, the norm is summed in another order, the coefficient goes into the division by the scale, and fused AdamW
    runs on our kernels: a few ulp, which the optimizers carry on.
    """
    norm, value = CLIPPINGS[clipping]
    ours = _helped(KINDS[kind], norm, value, _ours())
    theirs = _looped(KINDS[kind], norm, value, _torchs())
    assert theirs.norms[0] > 0.5  # there is something to clip
    _check_same(ours, theirs, bitwise=clipping == "none" or (clipping == "loose" and kind != "adamw_fused"))


@pytest.mark.default("sgd-both", "adamw_fused-none", "own-both", "sgd_momentum_fused-both")
@pytest.mark.parametrize(("kind", "clipping"), list(product(KINDS, CLIPPINGS)))
def test_reads_nothing_with_optimizers_that_skip_on_the_device(kind: str, clipping: str) -> None:
    """With a fused optimizer the host reads nothing, and no pass unscales; any other costs the one read to skip."""
    module = model(torch.float32)
    optimizer, scaler = KINDS[kind](module), _ours()
    for step in range(2):
        loss = _loss(module, step)
        with OperatorCounter() as counter:
            optimizer_step(loss, optimizer, scaler, *CLIPPINGS[clipping])
        with OperatorCounter() as own:  # Adam's step counts lie on the host, but for fused=True
            optimizer.step()
        assert counter.host_reads == own.host_reads + (0 if kind in FUSED else 1)
        assert counter.counts[UNSCALE] == (0 if kind in FUSED else 1)
        assert kind not in FUSED or own.host_reads == 0


@pytest.mark.default("adamw_fused-scaler1", "adamw_foreach-None", "sgd-None")
@pytest.mark.parametrize(
    ("kind", "scaler"),
    list(product(KINDS, [None, GradScaler("cpu", enabled=False)])),
)
def test_without_a_scaler_overflows_are_skipped_all_the_same(kind: str, scaler: GradScaler | None) -> None:
    """None or a disabled scaler: the loss is not scaled; a NaN leaves every bit alone, where torch's loop is lost."""
    module, reference = model(torch.float32), model(torch.float32)
    optimizer, theirs = KINDS[kind](module), KINDS[kind](reference)
    for step in range(STEPS):
        before = copy.deepcopy((module.state_dict(), optimizer.state_dict()["state"]))
        result = optimizer_step(_loss(module, step), optimizer, scaler, 0.5)
        if step in OVERFLOWS:
            assert not result.success
            assert str((module.state_dict(), optimizer.state_dict()["state"])) == str(before)
            continue
        assert result.success
        theirs.zero_grad()
        _loss(reference, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        theirs.step()
        torch.testing.assert_close(result.grad_norm, norm)
    for mine, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", FUSED)
def test_half_gradients(kind: str, dtype: torch.dtype) -> None:
    """16-bit parameters: the norm is summed in fp32, so that it does not overflow, and overflows are skipped."""
    module = model(dtype)
    optimizer, scaler = KINDS[kind](module), _ours() if dtype == torch.float16 else None
    for step in range(STEPS):
        before = [param.detach().clone() for param in module.parameters()]
        result = optimizer_step(_loss(module, step), optimizer, scaler, 0.5)
        assert bool(result.success) == (step not in OVERFLOWS)
        changed = [not bits_equal(old, new) for old, new in zip(before, module.parameters(), strict=True)]
        assert any(changed) == (step not in OVERFLOWS)
        if step not in OVERFLOWS:
            single = copy.deepcopy(module).float()
            for old, param in zip(before, single.parameters(), strict=True):
                param.data.copy_(old)
            _loss(single, step).backward()
            expected = torch.cat([grad_of(param).flatten() for param in single.parameters()]).norm()
            torch.testing.assert_close(result.grad_norm, expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_clipping_by_value_hides_no_overflow(kind: str, bad: float) -> None:
    """One bad element, which a clamp would make finite, skips the step."""
    bag = Bag([torch.zeros(3), torch.zeros(2)])
    optimizer, scaler = KINDS[kind](bag), _ours()
    grads = [torch.tensor([1.0, bad, 0.0]), torch.ones(2)]
    loss = torch.stack([(param * grad).sum() for param, grad in zip(bag.parameters(), grads, strict=True)]).sum()
    bag[0].register_hook(lambda grad: torch.tensor([1.0, bad, 0.0]))
    result = optimizer_step(torch.nan_to_num(loss), optimizer, scaler, 1.0, 0.5)
    assert not result.success
    assert all((param == 0).all() for param in bag.parameters())
    assert scaler.get_scale() == 2.0**11


def test_finite_gradients_whose_norm_overflows_are_skipped() -> None:
    """Clipping would make zeros of them, and a step of weight decay alone; MixedPrecisionOptimizer skips them, too."""
    bag = Bag([torch.ones(4)])
    optimizer, scaler = torch.optim.SGD(bag.parameters(), lr=1.0, weight_decay=0.1), _ours()
    result = optimizer_step(bag[0].sum() * 1e30, optimizer, scaler, 1.0)
    assert not result.success
    assert bits_equal(bag[0], torch.ones(4))
    assert scaler.get_scale() == 2.0**11


def test_gradients_are_dropped_or_added_to() -> None:
    """What was left over does not count, unless zero_grad=False: the last micro-batch of an accumulation."""
    whole, parts = model(torch.float32), model(torch.float32)
    for module in (whole, parts):
        optimizer, scaler = INNER["adamw_fused"](module), _ours()
        for step in (0, 1):
            for param in module.parameters():
                param.grad = torch.full_like(param, 1e3)
            if module is whole:
                optimizer_step(_loss(module, step), optimizer, scaler, 0.5)
                continue
            optimizer.zero_grad()
            scaler.scale(_loss(module, step, slice(0, 4)) / 2).backward()
            optimizer_step(_loss(module, step, slice(4, 8)) / 2, optimizer, scaler, 0.5, zero_grad=False)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_sparse_gradients() -> None:
    """Duplicate rows count as their sum in the norm, as in a dense gradient; a clamp by value refuses them."""
    words = torch.tensor([1, 3, 1])
    tables = [nn.Embedding(4, 2, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    norms = []
    for table in tables:
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        norms.append(optimizer_step(table(words).square().sum(), optimizer, _ours(), 0.5).grad_norm)
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(tables[0].weight, tables[1].weight)
    sparse, optimizer = tables[0], torch.optim.SGD(tables[0].parameters(), lr=1.0)
    with pytest.raises(GradientError, match=r"parameter 0.*sparse=False"):
        optimizer_step(sparse(words).sum(), optimizer, _ours(), max_gradient_val=1.0)


# Optimizers that scale by themselves


def _mixed(module: nn.Module) -> MixedPrecisionOptimizer:
    scaler = DynamicGradScaler(2.0**12, 1.0, 2.0, 0.5, 3, 1)
    return MixedPrecisionOptimizer(
        INNER["adamw_fused"](module), OptimizerConfig(fp16=True, clip_grad=0.7), scaler, grads_are_scaled=True
    )


def _sharded(module: nn.Module) -> DistributedOptimizer:
    scaler, config = DynamicGradScaler(2.0**12, 1.0, 2.0, 0.5, 3, 1), OptimizerConfig(fp16=True, clip_grad=0.7)
    return DistributedOptimizer(INNER["adamw_fused"](module), config, scaler, modules=module, grads_are_scaled=True)


def _chained(module: nn.Module) -> ChainedOptimizer:
    scaler, config = DynamicGradScaler(2.0**12, 1.0, 2.0, 0.5, 3, 1), OptimizerConfig(fp16=True, clip_grad=0.7)
    named = list(module.named_parameters())
    parts = [torch.optim.AdamW(part, lr=1e-2) for part in (named[:3], named[3:])]
    return ChainedOptimizer([MixedPrecisionOptimizer(part, config, scaler, grads_are_scaled=True) for part in parts])


Wrapper = MixedPrecisionOptimizer | ChainedOptimizer
WRAPPERS: dict[str, Callable[[nn.Module], Wrapper]] = {"mixed": _mixed, "distributed": _sharded, "chained": _chained}


@pytest.mark.default("mixed-norm", "distributed-both")
@pytest.mark.parametrize(("kind", "clipping"), list(product(WRAPPERS, CLIPPINGS)))
def test_wrapped_optimizers(kind: str, clipping: str) -> None:
    """Bitwise what their own calls do, without a host read; the norm of the config counts again afterwards."""
    norm, value = CLIPPINGS[clipping]
    helped, looped = model(), model()
    ours, theirs = WRAPPERS[kind](helped), WRAPPERS[kind](looped)
    for step in range(STEPS):
        loss = _loss(helped, step)
        with OperatorCounter() as counter:
            result = optimizer_step(loss, ours, None if step % 2 else ours.grad_scaler, norm, value)
        assert counter.host_reads == 0
        assert ours.clip_grad == 0.7
        theirs.zero_grad()
        theirs.scale_loss(_loss(looped, step)).backward()
        theirs.clip_grad = 0.7 if norm is None else norm
        theirs.prepare_grads()
        if value is not None:
            theirs.clip_grad_value_(value)
        expected = theirs.step_with_ready_grads()
        assert bool(result.success) == bool(expected.success) == (step not in OVERFLOWS)
        assert bits_equal(result.grad_norm, expected.grad_norm)
        assert bits_equal(ours.get_loss_scale(), theirs.get_loss_scale())
    if isinstance(ours, MixedPrecisionOptimizer) and isinstance(theirs, MixedPrecisionOptimizer):
        assert same_bits(snapshot(ours, helped), snapshot(theirs, looped))
    for one, other in zip(helped.parameters(), looped.parameters(), strict=True):
        assert bits_equal(one, other)


def test_wrapped_optimizers_accumulate() -> None:
    """zero_grad=False keeps what earlier micro-batches left in the main grads."""
    module = model()
    optimizer = _sharded(module)
    with optimizer.no_sync():
        optimizer.scale_loss(_loss(module, 0)).backward()
    twice = optimizer_step(_loss(module, 0), optimizer, None, zero_grad=False).grad_norm
    fresh = model()
    once = optimizer_step(_loss(fresh, 0), _sharded(fresh), None).grad_norm
    torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=0)


# Misuse


def _misuses() -> dict[str, tuple[type[Exception], str, dict[str, Any]]]:
    detached = torch.ones((), requires_grad=False)
    fp16 = model()
    return {
        "no tensor": (ArgumentTypeError, "loss must be a tensor, got float", {"loss": 1.0}),
        "many elements": (ArgumentError, r"one element, got shape \(2,\)", {"loss": torch.ones(2, requires_grad=True)}),
        "no graph": (ArgumentError, "loss has no graph", {"loss": detached}),
        "no optimizer": (ArgumentTypeError, "torch.optim.Optimizer, got Tiny", {"optimizer": Tiny()}),
        "torch's scaler": (
            ArgumentTypeError,
            r"change the import of torch\.amp's to megascale",
            {"grad_scaler": _torchs()},
        ),
        "no scaler": (ArgumentTypeError, "GradScaler or None, got 65536", {"grad_scaler": 65536}),
        "Megatron's scaler": (ArgumentTypeError, "MixedPrecisionOptimizer", {"grad_scaler": ConstantGradScaler(2.0)}),
        "two scalers": (ArgumentError, "pass None", {"optimizer": _mixed(fp16)}),
        "norm of 0": (ArgumentError, "max_gradient_norm must be above 0, got 0", {"max_gradient_norm": 0}),
        "NaN": (ArgumentError, "max_gradient_val must be finite, got nan", {"max_gradient_val": math.nan}),
    }


@pytest.mark.parametrize("case", _misuses())
def test_misuse_changes_nothing(case: str) -> None:
    """An argument that does not fit is named; gradients, parameters and scaler are as they were."""
    kind, message, wrong = _misuses()[case]
    module = model(torch.float32)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    scaler = _ours()
    right: dict[str, Any] = {"loss": _loss(module, 0), "optimizer": INNER["sgd"](module), "grad_scaler": scaler}
    before = copy.deepcopy((module.state_dict(), scaler.state_dict()))
    with pytest.raises(kind, match=message):
        optimizer_step(**(right | wrong))
    assert str((module.state_dict(), scaler.state_dict())) == str(before)
    assert all((grad_of(param) == 1).all() for param in module.parameters())


def test_begun_iteration_is_refused() -> None:
    """After unscale_() or step() by hand the helper would unscale twice: it refuses before anything has changed."""
    module = model(torch.float32)
    optimizer, scaler = INNER["sgd"](module), _ours()
    scaler.scale(_loss(module, 0)).backward()
    scaler.unscale_(optimizer)
    before = [grad_of(param).clone() for param in module.parameters()]
    with pytest.raises(UsageError, match=r"grad_scaler.update\(\) first"):
        optimizer_step(_loss(module, 1), optimizer, scaler)
    assert all(bits_equal(grad_of(param), old) for param, old in zip(module.parameters(), before, strict=True))
    scaler.step(optimizer)
    scaler.update()
    optimizer_step(_loss(module, 1), optimizer, scaler)


@pytest.mark.parametrize("kind", ["adamw_fused", "sgd"])
def test_loss_of_something_else_is_refused(kind: str) -> None:
    """A loss that gives no parameter of the optimizer a gradient is an error, after which the next step works."""
    module, other = model(torch.float32), model(torch.float32)
    optimizer, scaler = INNER[kind](module), _ours()
    with pytest.raises(UsageError, match="does it depend on them"):
        optimizer_step(_loss(other, 0), optimizer, scaler)
    assert optimizer_step(_loss(module, 0), optimizer, scaler).success
