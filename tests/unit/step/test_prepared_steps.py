"""What prepare_grads() has decided is carried out once, whichever call carries it out."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.base_optimizer import MegascaleOptimizer
from megascale.errors import GradientError, UsageError
from megascale.grad_sync import GradSync
from tests.training import Sign, Tiny, bits_equal, grad_of, model, same_bits

BETWEEN: dict[str, Callable[[MegascaleOptimizer], Any]] = {
    "nothing": lambda optimizer: None,
    "the scale read": lambda optimizer: optimizer.get_loss_scale().item(),
}


def _make(kind: str) -> tuple[Tiny, MegascaleOptimizer]:
    """Return a model and its optimizer; the scale grows after each clean step."""
    module = model()
    scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 1, 1)
    config = OptimizerConfig(fp16=True, clip_grad=0.5)
    if kind == "chain":
        halves = [list(module.named_parameters())[:3], list(module.named_parameters())[3:]]
        return module, ChainedOptimizer(
            [MixedPrecisionOptimizer(torch.optim.AdamW(half, lr=1e-2), config, scaler) for half in halves]
        )
    sync = GradSync(module.named_parameters()) if kind == "GradSync" else None
    inner = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    return module, MixedPrecisionOptimizer(inner, config, scaler, grad_sync=sync)


def _backward(module: Tiny, optimizer: MegascaleOptimizer, seed: int, scale: float = 1.0) -> None:
    torch.manual_seed(seed)
    loss = module(torch.randn(8, 4).half()).float().square().mean()
    (optimizer.scale_loss(loss) * scale).backward()


def _state(module: Tiny, optimizer: MegascaleOptimizer) -> dict[str, torch.Tensor]:
    """Return all that a step may change."""
    state = optimizer.state_dict()
    numbers = tuple(state["step_counts"].values())
    found = {"scale": state["grad_scaler"]["scale"], "numbers": torch.tensor(numbers, dtype=torch.float64)}
    for name, param in module.named_parameters():
        found[name] = param.detach().clone()
        found |= {f"{name}.{key}": value for key, value in state["optimizer"]["state"][name].items()}
    return found


@pytest.mark.default("nothing-chain", "the scale read-plain")
@pytest.mark.parametrize("kind", ["plain", "GradSync", "chain"])
@pytest.mark.parametrize("between", BETWEEN)
def test_step_carries_out_what_was_prepared_once(kind: str, between: str) -> None:
    """prepare_grads() and then step() are one step: one division by the scale that multiplied the gradients, one update
    of the scale.
    """
    (module, optimizer), (twin, whole) = _make(kind), _make(kind)
    for seed in range(4):
        for one, own in ((module, optimizer), (twin, whole)):
            own.zero_grad()
            _backward(one, own, seed, scale=float("inf") if seed == 2 else 1.0)
        found_inf = optimizer.prepare_grads()
        BETWEEN[between](optimizer)
        result, expected = optimizer.step(), whole.step()
        assert bool(result.success) == (not found_inf) == bool(expected.success) == (seed != 2)
        assert bits_equal(result.grad_norm, expected.grad_norm) or seed == 2
        assert bits_equal(optimizer.get_loss_scale(), whole.get_loss_scale())
    assert same_bits(_state(module, optimizer), _state(twin, whole))
    with pytest.raises(UsageError, match=r"needs prepare_grads\(\) first"):
        optimizer.step_with_ready_grads()


@pytest.mark.default("False-plain", "True-GradSync", "False-chain", "True-plain")
@pytest.mark.parametrize("kind", ["plain", "GradSync", "chain"])
@pytest.mark.parametrize("reads", [False, True])
def test_gradients_are_measured_once(kind: str, reads: bool) -> None:
    """A second prepare_grads() of the same gradients is an error, also after a read of the scale, and the first still
    holds.
    """
    module, optimizer = _make(kind)
    _backward(module, optimizer, 0)
    optimizer.prepare_grads()
    if reads:
        optimizer.get_loss_scale()
    before = _state(module, optimizer)
    with pytest.raises(UsageError, match=r"prepare_grads\(\) has measured these gradients already.*step_with_ready"):
        optimizer.prepare_grads()
    assert same_bits(before, _state(module, optimizer))
    assert optimizer.step_with_ready_grads().success


def test_gradients_that_the_caller_has_changed_are_not_measured_twice() -> None:
    """Nobody has scaled a loss since: the error tells of the second call, not of a loss."""
    module, optimizer = _make("plain")
    _backward(module, optimizer, 0)
    optimizer.prepare_grads()
    for param in module.parameters():
        grad_of(param).mul_(0.5)
    with pytest.raises(UsageError, match=r"prepare_grads\(\) has measured these gradients already"):
        optimizer.prepare_grads()


ZEROED: dict[str, Callable[[Tiny, MegascaleOptimizer], Any]] = {
    "optimizer.zero_grad()": lambda module, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad(False)": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.default("optimizer.zero_grad(False)-plain", "optimizer.zero_grad()-chain")
@pytest.mark.parametrize("kind", ["plain", "chain"])
@pytest.mark.parametrize("zeroed", ZEROED)
def test_a_prepared_step_may_be_left_out(kind: str, zeroed: str) -> None:
    """As Megatron's callers leave out the second half of a skipped step: the next gradients are measured anew."""
    (module, optimizer), (twin, whole) = _make(kind), _make(kind)
    for seed in range(4):
        for one, own in ((module, optimizer), (twin, whole)):
            ZEROED[zeroed](one, own)
            _backward(one, own, seed, scale=float("inf") if seed == 1 else 1.0)
        if not optimizer.prepare_grads():
            optimizer.step_with_ready_grads()
        whole.step()
    assert same_bits(dict(optimizer.main_params()), dict(whole.main_params()))
    assert bits_equal(optimizer.get_loss_scale(), whole.get_loss_scale())


@pytest.mark.default("chain", "GradSync")
@pytest.mark.parametrize("kind", ["plain", "GradSync", "chain"])
def test_step_after_zero_grad_is_a_new_one(kind: str) -> None:
    """A prepared step that was left out is not taken with the next gradients."""
    (module, optimizer), (twin, whole) = _make(kind), _make(kind)
    for seed, one, own in ((0, module, optimizer), (0, twin, whole), (1, module, optimizer), (1, twin, whole)):
        own.zero_grad()
        _backward(one, own, seed)
        if seed == 0:
            own.prepare_grads()
    optimizer.step()
    whole.prepare_grads()
    whole.step_with_ready_grads()
    assert same_bits(_state(module, optimizer), _state(twin, whole))


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a write": lambda param: grad_of(param).mul_(2),
    "another tensor": lambda param: setattr(param, "grad", grad_of(param) * 2),
}


@pytest.mark.parametrize("second_half", ["step", "step_with_ready_grads"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_update_reads_the_gradients_that_are_there(change: str, second_half: str) -> None:
    """Gradients that changed after prepare_grads() are updated from, with the norm and clipping that were measured."""
    module = model()
    config = OptimizerConfig(fp16=True, clip_grad=0.5)
    scaler = DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 1, 1)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(module.named_parameters(), lr=1.0), config, scaler)
    _backward(module, optimizer, 0)
    optimizer.prepare_grads()
    decision = optimizer._decision
    assert decision is not None
    before = {name: main.clone() for name, main in optimizer.main_params()}
    CHANGES[change](module.head.weight)
    assert bits_equal(getattr(optimizer, second_half)().grad_norm, decision.grad_norm)
    for name, main in optimizer.main_params():
        grad = grad_of(module.get_parameter(name)).float()
        torch.testing.assert_close(main, before[name] - grad * decision.coefficient, rtol=1e-6, atol=1e-7)


def test_step_takes_clamped_gradients() -> None:
    """clip_grad_value_() between the calls is part of the prepared step."""
    (module, optimizer), (twin, whole) = _make("plain"), _make("plain")
    for one, own in ((module, optimizer), (twin, whole)):
        _backward(one, own, 0)
        own.prepare_grads()
        own.clip_grad_value_(1e-3)
    optimizer.step()
    whole.step_with_ready_grads()
    assert same_bits(_state(module, optimizer), _state(twin, whole))


class _Interrupted(Sign):
    """Its step is interrupted, once, after it has written."""

    is_over = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step(closure)
        if not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt


def test_an_update_that_was_interrupted_is_not_taken_again() -> None:
    """Its decision goes before the first write: whoever goes on after the interruption decides on the next step."""
    module = model()
    optimizer = MixedPrecisionOptimizer(_Interrupted(module.parameters()), grad_scaler=DynamicGradScaler(8.0))
    _backward(module, optimizer, 0)
    optimizer.prepare_grads()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert optimizer._decision is None
    with pytest.raises(UsageError, match=r"needs prepare_grads\(\) first"):
        optimizer.step_with_ready_grads()


def test_an_error_between_the_halves_is_raised_once() -> None:
    """By the second half of a rank that is alone, at once: the next step knows nothing of it."""
    module, optimizer = _make("plain")
    _backward(module, optimizer, 0)
    optimizer.prepare_grads()
    grad_of(module.head.weight).untyped_storage().resize_(0)
    with pytest.raises(GradientError, match=r"the gradient of 'head\.weight' has lost its memory"):
        optimizer.step_with_ready_grads()
    optimizer.zero_grad()
    _backward(module, optimizer, 1)
    assert optimizer.step().success


def test_what_a_dropped_chain_decided_is_its_optimizers() -> None:
    """One that steps by itself afterwards carries it out: with the chain's norm, and the scale moves once. Gradients
    are held for as long as a step is to be taken, not for as long as the chain is there.
    """
    (module, chain), (twin, whole) = _make("chain"), _make("chain")
    assert isinstance(chain, ChainedOptimizer)
    first, second = chain._optimizers
    _backward(module, chain, 0)
    _backward(twin, whole, 0)
    expected = whole.step()
    chain.prepare_grads()
    grads = [ref(grad_of(param)) for param in second.param_groups[0]["params"]]
    second.zero_grad()
    assert not any(grad() is not None for grad in grads)
    del chain
    assert first.step().grad_norm == expected.grad_norm
    assert float(first.get_loss_scale()) == float(whole.get_loss_scale())


@pytest.mark.parametrize("how", ["added", "unfrozen"])
@pytest.mark.parametrize("prepares", ["prepare_grads", "clip_grad_norm_"])
def test_parameters_that_were_not_measured_are_not_updated(how: str, prepares: str) -> None:
    """A gradient that nobody had measured was updated from, inf and NaN too, in a step that counted as landed."""
    module = model()
    named, scaler = list(module.named_parameters()), DynamicGradScaler(2.0**8)
    module.head.weight.requires_grad_(how == "added")
    inner = torch.optim.AdamW([one for one in named if one[1] is not module.head.weight or how == "unfrozen"], lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, None, scaler)
    _backward(module, optimizer, 1)
    module.head.weight.grad = torch.full_like(module.head.weight, float("nan")) if how == "added" else None
    before = [param.detach().clone() for param in module.parameters()]
    optimizer.prepare_grads() if prepares == "prepare_grads" else optimizer.clip_grad_norm_(1.0)
    if how == "added":
        optimizer.add_param_group({"params": [("head.weight", module.head.weight)]})
    else:
        module.head.weight.requires_grad_(True)
        module.head.weight.grad = torch.full_like(module.head.weight, float("nan"))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"parameter 'head.weight' was added or unfrozen after prepare_grads\(\)"):
            optimizer.step()
    assert all(map(bits_equal, before, [param.detach() for param in module.parameters()]))
    optimizer.zero_grad()
    _backward(module, optimizer, 2)
    assert optimizer.step().success
