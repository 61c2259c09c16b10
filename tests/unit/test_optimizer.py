"""MixedPrecisionOptimizer on one rank: the recipe, and what users do around it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig, StepResult
from tests.counting import OperatorCounter
from tests.training import (
    INNER,
    Sign,
    bits_equal,
    check_invariant_6,
    constant,
    grad_of,
    model,
    same_bits,
    set_grads,
    snapshot,
    wrap,
)


@pytest.mark.default("True-adam_maximize", "False-adam_amsgrad", "True-sgd_maximize", "True-sgd_momentum_fused")
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("count_zeros", [False, True])
def test_step_reads_nothing_on_the_host(inner: str, count_zeros: bool) -> None:
    """Invariant 5: no host read in step() for Adam, AdamW and SGD, with dynamic scale, clipping, skips and growth."""
    module = model()
    optimizer = wrap(module, INNER[inner], clip_grad=1.0, log_num_zeros_in_grad=count_zeros)
    for step in range(12):
        set_grads(module, seed=step)
        if step in (2, 7):
            grad_of(module.second.weight)[0, 0] = math.inf
        with OperatorCounter() as counter:
            optimizer.step()
        assert counter.host_reads == 0
    assert optimizer.num_skipped_steps.item() == 2


def test_spans_are_there_for_a_profiler_only() -> None:
    """A profiler sees each part of the recipe by name, and the step as torch names it; without one, no span opens."""
    module = model()
    optimizer = wrap(module, INNER["adamw_fused"], clip_grad=1.0)
    set_grads(module, seed=0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    seen = {event.key for event in profile.key_averages()}
    parts = ("finish", "measure", "agree", "decide", "rescale", "update", "gather")
    assert {f"megascale.{part}" for part in parts} | {"Optimizer.step#MixedPrecisionOptimizer.step"} <= seen
    with OperatorCounter() as counter:
        optimizer.step()
    assert not any("record_function" in str(operator) for operator in counter.counts)


@pytest.mark.parametrize("register", ["own", "global"])
def test_step_hooks_run(register: str) -> None:
    """Hooks of this optimizer, and those of all optimizers, run before and after a step, until they are removed."""
    module = model()
    optimizer = wrap(module, INNER["adamw_fused"])
    seen: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda stepping, *_: seen.append(name) if stepping is optimizer else None

    if register == "own":
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    else:
        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    handles = {"before": before(hook("before")), "after": after(hook("after"))}
    while True:
        seen.clear()
        set_grads(module, seed=0)
        optimizer.step()
        assert seen == list(handles)
        if not handles:
            return
        handles.pop(next(iter(handles))).remove()


@pytest.mark.native
def test_step_dispatches_few_operators() -> None:
    """A step on the native backend calls torch some fifteen times, landed or skipped: cold, each costs some 10 us."""
    module = model()
    optimizer = wrap(module, INNER["adamw_fused"], clip_grad=1.0, backend="native")
    for step in range(3):
        set_grads(module, seed=step)
        if step == 2:
            grad_of(module.second.weight)[0, 0] = math.inf
        with OperatorCounter() as counter:
            optimizer.step()
        if step > 0:  # the first one makes the tables
            assert sum(counter.counts.values()) <= 17


def test_other_optimizers_read_once() -> None:
    """A user-written optimizer costs one host read of `found_inf`, landed or skipped."""
    module = model()
    optimizer = wrap(module, lambda m: Sign(m.parameters()))
    for step in range(4):
        set_grads(module, seed=step)
        if step == 1:
            grad_of(module.second.weight)[0, 0] = math.inf
        with OperatorCounter() as counter:
            optimizer.step()
        assert counter.host_reads == 1
    assert optimizer.num_skipped_steps.item() == 1


GENERAL: dict[str, Any] = {
    "sign": lambda m: Sign(m.parameters(), lr=1e-3),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-3),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9),
    "adam_tensor_betas": lambda m: torch.optim.Adam(
        m.parameters(),
        lr=torch.tensor(1e-3),
        betas=(torch.tensor(0.9), torch.tensor(0.99)),
        capturable=False,
        foreach=False,
    ),
}


@pytest.mark.parametrize("kind", GENERAL)
def test_any_optimizer_works_on_main_params(kind: str) -> None:
    """Another optimizer sees main params and unscaled fp32 gradients; skips change nothing; the model follows."""
    module, masters = model(), model(torch.float32)
    with torch.no_grad():
        for master, param in zip(masters.parameters(), module.parameters(), strict=True):
            master.copy_(param)
    optimizer, theirs = constant(module, GENERAL[kind], 2.0**7), GENERAL[kind](masters)
    for step in range(20):
        set_grads(module, seed=step, scale=2.0**7)
        if step % 5 == 4:
            grad_of(module.first.weight)[0, 0] = math.nan
            before = snapshot(optimizer, module)
            assert not optimizer.step().success
            assert same_bits(before, snapshot(optimizer, module))
            continue
        for master, param in zip(masters.parameters(), module.parameters(), strict=True):
            master.grad = grad_of(param).float() / 2.0**7
        optimizer.step()
        theirs.step()
    for (_, main), master in zip(optimizer.main_params(), masters.parameters(), strict=True):
        assert bits_equal(main, master.detach())
    check_invariant_6(optimizer, module)
    assert all(grad_of(param).dtype == torch.float16 for param in module.parameters())
    assert {id(p) for p in optimizer.state} <= {id(p) for p in module.parameters()}


def test_hooks_on_the_inner_optimizer_run() -> None:
    """A hook registered on the wrapped optimizer runs: the step then goes through its own step(), with the same
    result.
    """
    plain, hooked = model(), model()
    calls: list[int] = []
    inner = INNER["adamw_fused"](hooked)
    inner.register_step_post_hook(lambda *_: calls.append(1))
    with_hook, without = constant(hooked, lambda _: inner, 8.0), constant(plain, INNER["adamw_fused"], 8.0)
    for step in range(3):
        set_grads(hooked, seed=step)
        set_grads(plain, seed=step)
        with_hook.step()
        without.step()
    assert len(calls) == 3
    for (_, a), (_, b) in zip(with_hook.main_params(), without.main_params(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_result_is_a_named_tuple_of_device_scalars() -> None:
    """StepResult unpacks as Megatron's three values, each a 0-d tensor; zeros are counted when asked, else NaN."""
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0, log_num_zeros_in_grad=True)
    set_grads(module, seed=0)
    grad_of(module.first.bias).zero_()
    result = optimizer.step()
    success, grad_norm, num_zeros = result
    assert isinstance(result, StepResult)
    assert all(value.shape == () for value in result)
    assert success.dtype == torch.bool
    assert grad_norm.dtype == torch.float32
    assert num_zeros.item() == 6
    silent = constant(module, INNER["sgd"], 1.0)
    assert silent.step().num_zeros_in_grad.isnan()


def test_bf16_without_a_scaler_skips_non_finite_gradients() -> None:
    """Megatron's clip turns a NaN norm into zero or NaN gradients and steps: ours skips, and
    counts.
    """
    module = model(torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.AdamW(module.parameters()), OptimizerConfig(bf16=True, clip_grad=1.0)
    )
    set_grads(module, seed=0)
    grad_of(module.first.weight)[0, 0] = math.nan
    before = snapshot(optimizer, module)
    result = optimizer.step()
    assert not result.success
    assert result.grad_norm.isnan()
    assert same_bits(before, snapshot(optimizer, module))
    assert optimizer.num_skipped_steps.item() == 1
    assert optimizer.get_loss_scale().item() == 1.0
    assert f"{optimizer.get_loss_scale():.0f}" == "1"
    set_grads(module, seed=1)
    assert optimizer.step().success


def test_norm_beyond_fp32_skips() -> None:
    """A finite gradient whose sum of squares leaves fp32 is an overflow on every backend, not a zero clip
    coefficient.
    """
    for backend in ("torch", "reference"):
        module = model(torch.bfloat16)
        optimizer = wrap(module, scale=None, clip_grad=1.0, backend=backend)
        set_grads(module, seed=0, scale=1e25)
        before = snapshot(optimizer, module)
        assert not optimizer.step().success
        assert same_bits(before, snapshot(optimizer, module))


def test_scale_loss_does_not_overflow_fp16() -> None:
    """Loss * scale in fp16 would be inf; gradients still reach the fp16 parameters."""
    module = model()
    optimizer = wrap(module, scale=2.0**16)
    loss = module(torch.ones(2, 4).half()).square().mean() + 3
    assert loss.dtype == torch.float16
    scaled = optimizer.scale_loss(loss)
    assert scaled.dtype == torch.float32
    assert scaled.shape == ()
    assert scaled.isfinite()
    batch = optimizer.scale_loss(torch.full((2, 3), 2.0, dtype=torch.float16))
    assert batch.shape == (2, 3)
    assert batch.unique().tolist() == [2.0**17]


def test_config_is_taken_from_the_parameters() -> None:
    """config=None: fp16 or bf16 from the dtypes, no clipping. fp16 without a scaler is refused, as Megatron does."""
    assert MixedPrecisionOptimizer(INNER["sgd"](model(torch.bfloat16)))._config == OptimizerConfig(bf16=True)
    assert MixedPrecisionOptimizer(INNER["sgd"](model(torch.float32)))._config == OptimizerConfig()
    ours = MixedPrecisionOptimizer(INNER["sgd"](model()), grad_scaler=ConstantGradScaler(2.0), grads_are_scaled=True)
    assert ours._config == OptimizerConfig(fp16=True)
