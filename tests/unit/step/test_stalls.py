"""Training that has stopped says so: every step skipped, zeros in every gradient, weights that are not finite."""

import math
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from megascale import (
    ChainedOptimizer,
    MixedPrecisionOptimizer,
)
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import (
    MinScaleError,
    NonFiniteParamError,
    SkippedStepsError,
)
from tests.training import INNER, Tiny, constant, grad_of, model, set_grads, wrap

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
Inner = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _train(module: Tiny, optimizer: MixedPrecisionOptimizer, steps: int) -> None:
    """Forward, backward and step."""
    dtype = next(module.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.scale_loss(module(torch.ones(3, 4, dtype=dtype)).float().square().mean()).backward()
        optimizer.step()


def _skip(module: Tiny, optimizer: MegascaleOptimizer, steps: int) -> None:
    for step in range(steps):
        _with_inf(module, step)
        optimizer.step()


def _with_inf(module: Tiny, seed: int) -> None:
    set_grads(module, seed)
    grad_of(module.head.weight)[0, 0] = math.inf


def _wrapped(module: Tiny, **options: object) -> MixedPrecisionOptimizer:
    """Wrap with a scale that no test here takes to its minimum."""
    scale = 2.0**120 if next(module.parameters()).dtype == torch.float16 else None
    return wrap(module, INNER["adamw_fused"], scale, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_skipped_for_long_are_warned_of(dtype: torch.dtype) -> None:
    """In every dtype: at the 32nd skip in a row, at the 64th, and not between; a landed step begins the count anew."""
    module = model(dtype)
    optimizer = _wrapped(module)
    _skip(module, optimizer, 31)
    set_grads(module, 0)
    optimizer.step()
    for step in range(1, 70):
        _with_inf(module, step)
        if step in (32, 64):
            with pytest.warns(RuntimeWarning, match=f"^{step} steps in a row were skipped: the gradients hold inf"):
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.num_skipped_steps.item() == 31 + 69


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_skips_than_are_allowed_are_an_error(dtype: torch.dtype) -> None:
    """``max_consecutive_skips`` steps are skipped; the next one raises before it is counted, and so do all after it."""
    module = model(dtype)
    optimizer = _wrapped(module, max_consecutive_skips=3)
    _skip(module, optimizer, 3)
    for _ in range(2):
        with pytest.raises(
            SkippedStepsError,
            match=r"steps in a row were skipped, .*max_consecutive_skips allows 3.* NaN: 'head.weight' \(1 of 4 ",
        ):
            optimizer.step()
    assert optimizer.num_skipped_steps.item() == 3
    set_grads(module, 0)
    assert optimizer.step().success


def _at_low_scale(module: Tiny, **options: object) -> MixedPrecisionOptimizer:
    """Wrap with a scale that is at its minimum, 1, after two overflows."""
    return wrap(module, INNER["adamw_fused"], 4.0, **options)


def test_overflows_at_the_smallest_scale_are_warned_of() -> None:
    """At the 8th in a row, and at the 16th; only those at the minimum count; a clean step begins the count anew."""
    module = model()
    optimizer = _at_low_scale(module)
    _skip(module, optimizer, 2 + 7)
    set_grads(module, 0)
    optimizer.step()
    for count in range(1, 18):
        _with_inf(module, count)
        if count in (8, 16):
            with pytest.warns(RuntimeWarning, match=f"^{count} steps in a row overflowed at the smallest .*, 1.0: the"):
                optimizer.step()
        else:
            optimizer.step()


def test_more_overflows_at_the_smallest_scale_than_are_allowed() -> None:
    """An error, before the step is counted; it names the worst parameters, the worst first, with their counts."""
    module = model()
    optimizer = _at_low_scale(module, max_overflows_at_min_scale=3)
    _skip(module, optimizer, 2 + 3)
    _with_inf(module, 0)
    grad_of(module.second.weight)[:2] = math.nan
    message = r"^4 steps in a row overflowed at the smallest loss scale, 1.0, .*max_overflows_at_min_scale allows 3"
    with pytest.raises(MinScaleError, match=message) as error:
        optimizer.step()
    worst = "most inf or NaN: 'second.weight' (12 of 24 elements, rank 0), 'head.weight' (1 of 4 elements, rank 0)"
    assert str(error.value).endswith(worst)
    assert optimizer.num_skipped_steps.item() == 5
    optimizer.load_state_dict(optimizer.state_dict())
    _skip(module, optimizer, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [INNER["adamw_fused"], lambda m: torch.optim.RMSprop(m.named_parameters())])
def test_weights_that_are_nan_are_named(dtype: torch.dtype, inner: Inner) -> None:
    """Gradients of NaN weights are NaN for ever: an error that names the parameter, and no advice on learning rates."""
    module = model(dtype)
    optimizer = wrap(module, inner, 2.0**10 if dtype == torch.float16 else None)
    with torch.no_grad():
        module.second.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteParamError, match=r"main param of 'second.weight' holds inf or NaN.*load a checkpoint"):
        _train(module, optimizer, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_that_makes_nan_is_named(dtype: torch.dtype) -> None:
    """A learning rate of NaN in a tensor spoils the weights in a step that lands."""
    module = model(dtype)
    optimizer = wrap(module, INNER["sgd"], 2.0**10 if dtype == torch.float16 else None)
    optimizer.param_groups[0]["lr"] = torch.tensor(math.nan)  # the host does not read it
    with pytest.raises(NonFiniteParamError, match=r"main param of 'first.weight', .*'head.weight' holds inf or NaN"):
        _train(module, optimizer, 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("there", [True, False])
def test_gradients_of_zeros_for_long_are_warned_of(dtype: torch.dtype, there: bool) -> None:
    """Zeros, or no gradients at all, in 8 steps in a row, in 16, 32 and 64: underflow, clipping by hand, no backward.
    Another gradient begins the count anew.
    """
    module = model(dtype)
    optimizer = _wrapped(module)
    set_grads(module, 0)
    optimizer.step()
    for step in range(1, 66):
        for param in module.parameters():
            param.grad = torch.zeros_like(param) if there else None
        if step in (8, 16, 32, 64):
            with pytest.warns(RuntimeWarning, match=f"no gradient, or none but zeros, in {step} steps in a row"):
                optimizer.step()
        else:
            optimizer.step()


def test_clipping_by_hand_while_scaled_is_noticed() -> None:
    """Torch's clip_grad_norm_ on fp16 gradients that are still scaled, to a norm that unscaled ones never have."""
    module = model()
    optimizer = wrap(module, INNER["adamw_fused"], 2.0**16)
    for step in range(8):
        set_grads(module, step)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-8)
        if step < 7:
            optimizer.step()
    with pytest.warns(RuntimeWarning, match=r"clip with optimizer\.clip_grad, not by hand"):
        optimizer.step()


@pytest.mark.default("65536.0-sgd-5.0", "1024.0-adamw_fused-1.0", "1024.0-sgd-0.1", "1024.0-sgd-5.0")
@pytest.mark.parametrize("limit", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("inner", ["adamw_fused", "sgd"])
@pytest.mark.parametrize("scale", [1024.0, 65536.0])
def test_clipping_to_a_usual_norm_while_scaled_is_noticed(limit: float, inner: str, scale: float) -> None:
    """Within 8 steps; then after 16. A loop that keeps torch's clip_grad_norm_ learnt nothing without a word."""
    module = model()
    optimizer = wrap(module, INNER[inner], scale)
    for step in range(17):
        set_grads(module, step, scale=64.0)
        torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
        if step + 1 in (8, 16):
            words = (
                f"was {limit:.3g} in {step + 1} steps in a row.*clipped while.*optimizer.clip_grad = {limit:.3g} once"
            )
            with pytest.warns(RuntimeWarning, match=words):
                optimizer.step()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()


SOUND = ["clipped unscaled", "another norm each step", "above any limit", "one gradient", "no scaler", "scale of 1"]


@pytest.mark.parametrize("kind", SOUND)
def test_sound_norms_are_no_clipping_by_hand(kind: str) -> None:
    """Clipping by the optimizer, norms that change by 1 %, large ones, a gradient that never changes, as a benchmark's,
    and training without a scale or at a scale of 1.
    """
    module = model(torch.float32 if kind == "no scaler" else torch.float16)
    if kind == "no scaler":
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    else:
        make = constant if kind == "scale of 1" else wrap
        optimizer = make(module, INNER["sgd"], 1.0 if kind == "scale of 1" else 65536.0)
    optimizer.clip_grad = 1.0 if kind == "clipped unscaled" else 0.0
    norms = {"another norm each step": 1.01, "above any limit": 200.0, "no scaler": 1.0, "scale of 1": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(40):
            set_grads(module, 0 if kind == "one gradient" else step, scale=1.0 if kind == "one gradient" else 64.0)
            if kind in norms:
                limit = norms[kind] ** step if kind == "another norm each step" else norms[kind]
                torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
            optimizer.step()


@pytest.mark.parametrize("by_weights", [False, True])
@pytest.mark.parametrize("into", ["an optimizer", "a chain", "a member of a chain"])
def test_load_begins_the_count_anew(into: str, by_weights: bool) -> None:
    """Going back to a checkpoint, or to other weights, is the remedy: it is not held against what comes after."""
    module = model()
    member = _wrapped(module, max_consecutive_skips=3)
    optimizer: MegascaleOptimizer = member if into == "an optimizer" else ChainedOptimizer([member])
    target: MegascaleOptimizer = optimizer if into == "a chain" else member
    saved = target.state_dict()
    for _ in range(3):
        _skip(module, optimizer, 3)
        target.reload_model_params() if by_weights else target.load_state_dict(saved)
