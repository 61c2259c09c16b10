"""MixedPrecisionOptimizer on one rank: the recipe, and what users do around it."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from megascale import ConstantGradScaler, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, StepResult
from megascale.errors import ArgumentError, ArgumentTypeError, GradientError, MainParamOverflowError, UsageError
from tests.cases import cases
from tests.counting import OperatorCounter
from tests.training import INNER, Bag, Sign, bits_equal, constant, grad_of, model, same_bits, set_grads, snapshot, wrap


def _invariant_6(optimizer: MixedPrecisionOptimizer, module: nn.Module) -> None:
    mains = dict(optimizer.main_params())
    for name, param in module.named_parameters():
        if name in mains:
            assert bits_equal(param, mains[name].to(param.dtype))


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
    """A profiler sees each part of the recipe by name; without one, a step opens the one span that torch puts around
    any optimizer's, and dispatches no operator for ours.
    """
    module = model()
    optimizer = wrap(module, INNER["adamw_fused"], clip_grad=1.0)
    set_grads(module, seed=0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    seen = {event.key for event in profile.key_averages()}
    parts = ("finish", "measure", "agree", "decide", "rescale", "update", "gather")
    assert {f"megascale.{part}" for part in parts} <= seen
    with OperatorCounter() as counter:
        optimizer.step()
    assert sum(count for operator, count in counter.counts.items() if "record_function_enter" in str(operator)) == 1


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
    _invariant_6(optimizer, module)
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


@pytest.mark.parametrize(
    ("inner", "dtype"),
    cases(
        ["adamw_fused", "sgd_momentum_fused", "adamw_foreach"],
        [torch.float16, torch.bfloat16],
        quick=lambda inner, dtype: (inner, dtype) == ("adamw_fused", torch.float16),
    ),
)
def test_small_updates_accumulate_like_fp64(inner: str, dtype: torch.dtype) -> None:
    """With an lr so small that 16-bit weights stand still, main params track fp64 to fp32 accuracy for 1,000 steps."""
    lr = 1e-6
    module = model(dtype)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(0.75)
    exact = copy.deepcopy(module).double()
    optimizer, theirs = constant(module, INNER[inner], 2.0**10), INNER[inner](exact)
    for one in (optimizer, theirs):
        for group in one.param_groups:
            group["lr"] = lr
            group["weight_decay"] = 0.0
    alone = torch.full((), 0.75, dtype=dtype)
    for step in range(1000):
        set_grads(module, seed=step)
        for p, q in zip(module.parameters(), exact.parameters(), strict=True):
            p.grad = (grad_of(p).abs() * 2.0**10).to(dtype)
            q.grad = grad_of(p).double() / 2.0**10
        optimizer.step()
        theirs.step()
        alone = alone - lr
    assert alone.item() == 0.75  # what the 16-bit weight alone would have done
    # fp32 accuracy: each step rounds to within 2**-25, and 1,000 of those add up like a random walk.
    drift = 4 * 1000**0.5 * 2.0**-25
    for (_, main), reference in zip(optimizer.main_params(), exact.parameters(), strict=True):
        assert (0.75 - reference.detach()).min() > 400 * lr
        assert (main.double() - reference.detach()).abs().max() < drift


def test_recipe_of_clip_and_norm() -> None:
    """Norm = sqrt(sum) / scale over all tensors; clip = min(1, max / (norm + 1e-6)), as torch's clip_grad_norm_ has
    it.
    """
    for clip in (0.5, 1e6):
        module, masters = model(), model(torch.float32)
        optimizer = constant(module, INNER["sgd"], 2.0**8, clip_grad=clip)
        theirs = INNER["sgd"](masters)
        with torch.no_grad():
            for master, (_, main) in zip(masters.parameters(), optimizer.main_params(), strict=True):
                master.copy_(main)
        set_grads(module, seed=1, scale=2.0**8)
        for master, param in zip(masters.parameters(), module.parameters(), strict=True):
            master.grad = grad_of(param).float() / 2.0**8
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
        result = optimizer.step()
        theirs.step()
        torch.testing.assert_close(result.grad_norm, norm)
        for (_, main), master in zip(optimizer.main_params(), masters.parameters(), strict=True):
            torch.testing.assert_close(main, master.detach(), rtol=1e-6, atol=1e-8)


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
    assert optimizer.get_loss_scale().tolist() == [1.0]
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


def test_skips_and_scales_equal_torch_amp() -> None:
    """A torch GradScaler + AdamW loop in fp32 and ours agree on every skip and every scale, on one schedule, hysteresis
    1.
    """
    ours_model, their_model = model(torch.float32), model(torch.float32)
    config = OptimizerConfig(fp16=True, clip_grad=0.0)
    scaler = DynamicGradScaler(2.0**16, 2.0**-100, 2.0, 0.5, 3, 1)
    ours = MixedPrecisionOptimizer(
        torch.optim.AdamW(ours_model.parameters(), lr=1e-2), config, scaler, grads_are_scaled=True
    )
    theirs = torch.optim.AdamW(their_model.parameters(), lr=1e-2)
    their_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    poisoned = {2, 3, 9, 10, 11, 20}
    for step in range(40):
        for module in (ours_model, their_model):
            module.zero_grad()
        ours.scale_loss(ours_model(data).square().mean()).backward()
        their_scaler.scale(their_model(data).square().mean()).backward()
        if step in poisoned:
            for module in (ours_model, their_model):
                grad_of(module.first.weight)[0, 0] = math.inf
        their_weights = [p.detach().clone() for p in their_model.parameters()]
        result = ours.step()
        their_scaler.step(theirs)
        their_scaler.update()
        skipped = all(torch.equal(a, b) for a, b in zip(their_weights, their_model.parameters(), strict=True))
        assert bool(result.success) != skipped
        assert bool(result.success) == (step not in poisoned)
        assert ours.get_loss_scale().item() == their_scaler.get_scale()
    for p, q in zip(ours_model.parameters(), their_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_growth_step_unscales_with_the_scale_that_scaled() -> None:
    """DeepSpeed updates the scale before unscaling: each growth step applies half a gradient."""
    module, twin = model(), model()
    growing, still = wrap(module, INNER["sgd"], scale=2.0**4), constant(twin, INNER["sgd"], 2.0**4)
    for step in range(4):  # the window is 4: the fourth step grows
        for one in (module, twin):
            set_grads(one, seed=step)
        growing.step()
        still.step()
    assert growing.get_loss_scale().item() == 2.0**5
    for (_, a), (_, b) in zip(growing.main_params(), still.main_params(), strict=True):
        assert bits_equal(a, b)


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


def test_gradients_accumulate() -> None:
    """Two backward passes before a step give the update of their sum."""
    module, twin = model(), model()
    ours, theirs = constant(module, INNER["sgd"], 4.0), constant(twin, INNER["sgd"], 4.0)
    first, second = torch.randn(2, 4).half(), torch.randn(2, 4).half()
    for data in (first, second):
        ours.scale_loss(module(data).float().sum()).backward()
    theirs.scale_loss(twin(first).float().sum() + twin(second).float().sum()).backward()
    ours.step()
    theirs.step()
    for (_, a), (_, b) in zip(ours.main_params(), theirs.main_params(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    ours.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    set_grads(module, 0)
    ours.zero_grad(set_to_none=False)
    assert all(not grad_of(p).any() for p in module.parameters())


def test_param_groups_are_shared_and_obeyed() -> None:
    """Each group has its own lr and weight decay; writes to param_groups and LR schedulers take effect."""
    module = model()
    inner = torch.optim.SGD(
        [
            {"params": [module.first.weight], "lr": 0.0},
            {"params": [module.second.weight], "lr": 1.0, "weight_decay": 0.5},
        ],
        lr=0.1,
    )
    optimizer = constant(module, lambda _: inner, 1.0)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    start = [module.first.weight.detach().clone(), module.second.weight.detach().float()]
    module.first.weight.grad, module.second.weight.grad = torch.ones(6, 4).half(), torch.zeros(4, 6).half()
    optimizer.step()
    assert bits_equal(module.first.weight, start[0])
    torch.testing.assert_close(dict(optimizer.main_params())["1"], start[1] * 0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.5]
    optimizer.param_groups[0]["lr"] = 1.0
    before = module.first.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(module.first.weight.detach(), before - 1)


def test_scheduler_on_the_inner_optimizer_does_not_warn() -> None:
    """A scheduler built before wrapping counts our steps as steps."""
    module = model()
    inner = INNER["adamw_fused"](module)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    optimizer = constant(module, lambda _: inner, 1.0)
    set_grads(module, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_step_hooks_run() -> None:
    """It is a torch.optim.Optimizer: its own step hooks run around every step."""
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    set_grads(module, 0)
    optimizer.step()
    assert calls == ["pre", "post"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "lr: 0.01" in repr(optimizer)


def test_added_group_is_trained() -> None:
    """add_param_group takes model params, makes their main params and state, and steps them."""
    module, extra = model(), nn.Linear(3, 3).half()
    optimizer = constant(module, INNER["adamw_fused"], 1.0)
    optimizer.add_param_group({"params": list(extra.named_parameters(prefix="extra")), "lr": 0.5})
    names = [name for name, _ in optimizer.main_params()]
    assert names[-2:] == ["extra.weight", "extra.bias"]
    before = extra.weight.detach().clone()
    set_grads(extra, 0)
    optimizer.step()
    assert not bits_equal(before, extra.weight)
    assert set(optimizer.state[extra.weight]) == {"exp_avg", "exp_avg_sq", "step"}
    assert len(optimizer.param_groups) == 2


def test_frozen_then_unfrozen() -> None:
    """A frozen parameter has no main param and never moves; unfrozen, it starts from the model's weights and trains."""
    module = model()
    module.first.weight.requires_grad_(False)
    optimizer = constant(module, INNER["adamw_fused"], 1.0)
    frozen = module.first.weight.detach().clone()
    assert "first.weight" not in dict(optimizer.main_params())
    for param in module.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    assert bits_equal(frozen, module.first.weight)
    module.first.weight.requires_grad_(True)
    set_grads(module, 0)
    optimizer.step()
    assert optimizer.state[module.first.weight]["step"].item() == 1
    assert optimizer.state[module.second.weight]["step"].item() == 2
    assert not bits_equal(frozen, module.first.weight)
    module.first.weight.requires_grad_(False)
    module.first.weight.grad = None
    kept = dict(optimizer.main_params())["first.weight"].clone()
    optimizer.step()
    assert bits_equal(kept, dict(optimizer.main_params())["first.weight"])


def test_parameters_without_gradients_stand_still() -> None:
    """No gradient: no weight decay, no step count, as in torch. No gradients at all: a landed step of norm 0."""
    module = model()
    optimizer = constant(module, INNER["adamw_fused"], 1.0, log_num_zeros_in_grad=True)
    before = snapshot(optimizer, module)
    result = optimizer.step()
    assert bool(result.success)
    assert result.grad_norm.item() == 0
    assert result.num_zeros_in_grad.item() == 0
    assert same_bits(before, snapshot(optimizer, module))
    module.first.bias.grad = torch.ones_like(module.first.bias)
    optimizer.step()
    changed = {key for key, value in snapshot(optimizer, module).items() if not bits_equal(value, before[key])}
    assert changed
    assert all("first.bias" in key for key in changed)


def test_tied_weights_count_once() -> None:
    """A weight used twice is one parameter: counted once in the norm, stepped once."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).half()
    tied = nn.Parameter(torch.ones(4, 4).half())
    for layer in module:
        layer.weight = tied
    optimizer = constant(module, INNER["sgd"], 1.0)
    tied.grad = torch.ones(4, 4).half()
    assert optimizer.step().grad_norm.item() == 4.0
    assert [name for name, _ in optimizer.main_params()] == ["0.weight"]


def test_mixed_dtypes_in_one_optimizer() -> None:
    """fp16, bf16, fp32 and fp64 parameters together: 16-bit ones have copies, the others are their own main params."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    module = Bag(torch.ones(3, dtype=dtype) for dtype in dtypes)
    for inner in ("adamw_fused", "sgd_momentum_fused"):
        optimizer = constant(module, INNER[inner], 4.0)
        set_grads(module, 0)
        assert optimizer.step().success
        mains = [main for _, main in optimizer.main_params()]
        assert [main.dtype for main in mains] == [torch.float32, torch.float32, torch.float32, torch.float64]
        assert mains[2] is module[2]
        assert mains[3] is module[3]
        _invariant_6(optimizer, module)


def test_loaded_weights_are_followed() -> None:
    """Invariant 6: weights loaded into the model reach the main params; the next step does not revert them (Megatron-LM
    174).
    """
    module, other = model(seed=0), model(seed=1)
    optimizer = constant(module, INNER["sgd"], 1.0)
    set_grads(module, 0)
    optimizer.step()
    module.load_state_dict(other.state_dict())
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert bits_equal(p, q)
    _invariant_6(optimizer, module)


def test_following_keeps_the_bits_that_still_fit() -> None:
    """An outside write to some elements, or a swap there and back, loses no fp32 bit of the others."""
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0)
    for step in range(3):
        set_grads(module, step, scale=0.01)
        optimizer.step()
    before = {name: main.clone() for name, main in optimizer.main_params()}
    weights = copy.deepcopy(module.state_dict())
    module.load_state_dict(model(seed=5).state_dict())
    module.load_state_dict(weights)
    assert all(bits_equal(main, before[name]) for name, main in optimizer.main_params())
    with torch.no_grad():
        module.first.weight[0, 0] = 7.0
    mains = dict(optimizer.main_params())
    assert mains["first.weight"][0, 0].item() == 7.0
    assert torch.equal(mains["first.weight"][1:], before["first.weight"][1:])
    module.load_state_dict(weights)
    optimizer.reload_model_params()
    assert all(bits_equal(main, weights[name].float()) for name, main in optimizer.main_params())


def test_untouched_weights_cost_no_pass() -> None:
    """Only a model param that someone else wrote is compared with its main param: not after a step, not after a
    load.
    """
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0)
    compared = torch.ops.aten.view.dtype
    for action in (optimizer.step, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        set_grads(module, 0)
        action()
        with OperatorCounter() as counter:
            optimizer.step()
        assert counter.counts[compared] == 0
    module.load_state_dict(module.state_dict())
    with OperatorCounter() as counter:
        optimizer.step()
    assert counter.counts[compared] > 0


def test_new_storage_is_followed() -> None:
    """``param.data = tensor`` swaps storage without a version: it is noticed all the same."""
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0)
    module.first.weight.data = torch.full((6, 4), 3.0).half()
    assert dict(optimizer.main_params())["first.weight"].unique().tolist() == [3.0]


def test_model_cast_after_wrapping_is_refused() -> None:
    """model.float() after the optimizer was built would tear main params from their model params."""
    module = model()
    optimizer = constant(module, INNER["sgd"], 1.0)
    module.float()
    with pytest.raises(UsageError, match=r"parameter 'first.weight' became .* torch.float32 .* cast the model first"):
        optimizer.step()


@pytest.mark.parametrize("inner", [INNER["sgd"], lambda m: Sign(m.named_parameters(), lr=1e-2)])
def test_main_param_that_outgrows_fp16_is_named(inner: Any) -> None:
    """Nobody checks the rounding of masters: ours raises, names the parameter, keeps the main
    param.
    """
    module = model()
    optimizer = constant(module, inner, 1.0)
    optimizer.param_groups[0]["lr"] = 70000.0
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    grad_of(module.second.bias)[1] = 1.0
    with pytest.raises(MainParamOverflowError, match=r"main param of 'second.bias' is 65520 or more"):
        optimizer.step()
    assert dict(optimizer.main_params())["second.bias"][1].item() == pytest.approx(-70000, rel=1e-4)
    with torch.no_grad():
        dict(optimizer.main_params())["second.bias"].clamp_(-100, 100)
    optimizer.param_groups[0]["lr"] = 0.0
    assert optimizer.step().success
    assert module.second.bias[1].item() == -100


def test_main_param_of_any_group_that_outgrows_fp16_is_named() -> None:
    """An overflowing rounding is found in each param group, not only in the first."""
    for overflowing in range(3):
        weights = [nn.Parameter(torch.ones(4).half()) for _ in range(3)]
        inner = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=70000.0)
        optimizer = MixedPrecisionOptimizer(
            inner, OptimizerConfig(fp16=True, clip_grad=0.0), ConstantGradScaler(1.0), grads_are_scaled=True
        )
        for index, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, float(index == overflowing))
        with pytest.raises(MainParamOverflowError, match=f"main param of '{overflowing}' is 65520 or more"):
            optimizer.step()


def test_sparse_gradients_are_refused_by_name() -> None:
    """A sparse gradient gets a clear error and changes nothing."""
    module = nn.Embedding(10, 4, sparse=True).half()
    optimizer = constant(module, INNER["sgd"], 1.0)
    optimizer.scale_loss(module(torch.tensor([1, 2])).float().sum()).backward()
    before = snapshot(optimizer, module)
    with pytest.raises(GradientError, match=r"the gradient of 'weight' has layout torch.sparse_coo; .* sparse=False"):
        optimizer.step()
    assert same_bits(before, snapshot(optimizer, module))


def test_halves_of_a_step() -> None:
    """prepare_grads decides and rescales; step_with_ready_grads updates. Megatron's callers leave out the second if
    skipped.
    """
    module, twin = model(), model()
    halves, whole = wrap(module), wrap(twin)
    for step in range(8):
        for one in (module, twin):
            set_grads(one, step)
            if step in (1, 5):
                grad_of(one.first.weight)[0, 0] = math.inf
        found_inf = halves.prepare_grads()
        assert found_inf.shape == ()
        if not found_inf:
            halves.step_with_ready_grads()
        whole.step()
        assert bits_equal(halves.get_loss_scale(), whole.get_loss_scale())
    assert same_bits(snapshot(halves, module), snapshot(whole, twin))
    with pytest.raises(UsageError, match=r"step_with_ready_grads\(\) needs prepare_grads\(\) first"):
        whole.step_with_ready_grads()


def test_step_count_is_right_after_a_first_skip() -> None:
    """Apex's and TE's capturable Adam is off by one for later groups if the first step overflows."""
    module = model()
    inner = torch.optim.AdamW([{"params": [p]} for p in module.parameters()])
    optimizer = constant(module, lambda _: inner, 1.0)
    for step in range(3):
        set_grads(module, step)
        if step == 0:
            grad_of(module.first.weight)[0, 0] = math.inf
        optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_state_of_an_optimizer_that_has_stepped_is_kept() -> None:
    """Wrapping an optimizer in the middle of a run keeps its moments and step counts, in fp32."""
    module = model(torch.bfloat16)
    inner = torch.optim.AdamW(module.parameters(), foreach=False)
    set_grads(module, 0)
    inner.step()
    moments = {id(p): state["exp_avg"].clone() for p, state in inner.state.items()}
    optimizer = constant(module, lambda _: inner, 1.0)
    for param, state in optimizer.state.items():
        assert state["exp_avg"].dtype == torch.float32
        assert torch.equal(state["exp_avg"], moments[id(param)].float())
        assert state["step"].item() == 1
    set_grads(module, 1)
    assert optimizer.step().success


def test_config_is_taken_from_the_parameters() -> None:
    """config=None: fp16 or bf16 from the dtypes, no clipping. fp16 without a scaler is refused, as Megatron does."""
    assert MixedPrecisionOptimizer(INNER["sgd"](model(torch.bfloat16))).config == OptimizerConfig(
        bf16=True, clip_grad=0.0
    )
    assert MixedPrecisionOptimizer(INNER["sgd"](model(torch.float32))).config == OptimizerConfig(clip_grad=0.0)
    ours = MixedPrecisionOptimizer(INNER["sgd"](model()), grad_scaler=ConstantGradScaler(2.0), grads_are_scaled=True)
    assert ours.config == OptimizerConfig(fp16=True, clip_grad=0.0)


def _sgd(dtype: torch.dtype = torch.float16, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model(dtype).parameters(), lr=0.1, **options)


def _complex_parameter() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: MixedPrecisionOptimizer("sgd"), ArgumentTypeError, "optimizer must be a torch.optim.Optimizer, got str"),  # type: ignore[arg-type]
    (lambda: MixedPrecisionOptimizer(_sgd()), ArgumentError, "grad_scaler is None, but fp16 gradients need one"),
    (
        lambda: MixedPrecisionOptimizer(_sgd(), OptimizerConfig(fp16=True)),
        ArgumentError,
        "grad_scaler is None, but fp16 gradients need one",
    ),
    (
        lambda: MixedPrecisionOptimizer(
            _sgd(), OptimizerConfig(bf16=True), ConstantGradScaler(1.0), grads_are_scaled=True
        ),
        ArgumentError,
        "config.fp16 is False, but the optimizer has fp16 parameters; set fp16=True",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(torch.bfloat16), OptimizerConfig()),
        ArgumentError,
        "config.bf16 is False, but the optimizer has bf16 parameters; set bf16=True",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(), {"fp16": True}, ConstantGradScaler(1.0), grads_are_scaled=True),  # type: ignore[arg-type]
        ArgumentTypeError,
        "config must be an OptimizerConfig or None, got dict",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(), None, torch.amp.GradScaler("cpu"), grads_are_scaled=True),  # type: ignore[arg-type]
        ArgumentTypeError,
        "grad_scaler is a torch.amp.GradScaler, which drives a bare torch optimizer",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(torch.float32), groups=3),  # type: ignore[arg-type]
        ArgumentTypeError,
        "groups must be None, a ParallelGroups, a ProcessGroup or a DeviceMesh, got 3",
    ),
    (
        lambda: MixedPrecisionOptimizer(MixedPrecisionOptimizer(_sgd(torch.float32))),
        ArgumentTypeError,
        "optimizer is a MixedPrecisionOptimizer already",
    ),
    (
        lambda: MixedPrecisionOptimizer(torch.optim.LBFGS(model(torch.float32).parameters())),
        ArgumentError,
        "optimizer LBFGS needs a closure",
    ),
    (
        lambda: MixedPrecisionOptimizer(torch.optim.SparseAdam(model(torch.float32).parameters())),
        ArgumentError,
        "optimizer SparseAdam works on sparse gradients only",
    ),
    (
        lambda: MixedPrecisionOptimizer(_sgd(torch.float32, differentiable=True)),
        ArgumentError,
        "param group 0 has differentiable=True",
    ),
    (
        lambda: MixedPrecisionOptimizer(_complex_parameter()),
        ArgumentTypeError,
        "parameter '0' has dtype torch.complex64",
    ),
    (lambda: _duplicate_names(), ArgumentError, "two parameters are called 'w'"),
    (lambda: constant(model(), INNER["sgd"], 1.0).step(lambda: 0.0), UsageError, r"step\(\) takes no closure"),
    (lambda: copy.deepcopy(constant(model(), INNER["sgd"], 1.0)), UsageError, "cannot be pickled or deep-copied"),
]


def _duplicate_names() -> MixedPrecisionOptimizer:
    module = model(torch.float32)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    return MixedPrecisionOptimizer(inner, named_parameters=[("w", module.first.weight), ("w", module.first.bias)])


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_misuse_is_refused_by_name(call: Any, kind: type[Exception], message: str) -> None:
    """Every argument that does not fit gets an error that names it and says what to do."""
    with pytest.raises(kind, match=message):
        call()


def test_a_frozen_parameter_may_be_anything() -> None:
    """What has no main param is not looked at: a sparse one among the groups' parameters stops no step."""
    param = nn.Parameter(torch.ones(3).half())
    frozen = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD([param, frozen], lr=1.0), None, ConstantGradScaler(1.0), grads_are_scaled=True
    )
    param.grad = torch.ones(3).half()
    optimizer.step()
    assert not param.any()


def test_a_frozen_parameter_written_after_its_state_was_loaded_is_followed() -> None:
    """Its main param, which the load made, takes the write over when the parameter is unfrozen."""

    def built(frozen: bool) -> tuple[nn.Parameter, MixedPrecisionOptimizer]:
        param, other = nn.Parameter(torch.ones(3).half(), requires_grad=not frozen), nn.Parameter(torch.ones(3).half())
        inner = torch.optim.SGD([param, other], lr=1.0)
        return param, MixedPrecisionOptimizer(inner, None, ConstantGradScaler(1.0), grads_are_scaled=True)

    param, optimizer = built(frozen=True)
    optimizer.load_state_dict(built(frozen=False)[1].state_dict())
    with torch.no_grad():
        param.fill_(5.0)
    param.requires_grad_(True).grad = torch.zeros(3).half()
    optimizer.step()
    assert param.tolist() == [5.0] * 3
    assert dict(optimizer.main_params())["0"].tolist() == [5.0] * 3
