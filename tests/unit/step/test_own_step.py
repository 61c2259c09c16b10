"""Optimizers that run their own step() on main params: what they are shown, and what is put back."""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import ConstantGradScaler, MixedPrecisionOptimizer
from megascale.errors import ArgumentError, UsageError
from tests.training import Bag, Sign, bits_equal, set_grads


class Plain(torch.optim.Optimizer):
    """A user-written optimizer without state. Where ``fails`` is set its step raises before it writes."""

    def __init__(self, params: Iterable[Any], lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})
        self.fails = False
        self.shown: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        self.shown = [p for group in self.param_groups for p in group["params"]]
        if self.fails:
            raise RuntimeError("out of paper")
        for p in self.shown:
            if p.grad is not None:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


def _mixed() -> Bag:
    return Bag([torch.ones(3).half(), torch.ones(2), torch.ones(4).half()])


def _wrapped(module: nn.Module, inner: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(inner, grad_scaler=ConstantGradScaler(8.0))


def test_optimizer_without_state_trains() -> None:
    """An optimizer that keeps no state updates fp32 main params of fp16 parameters, and fp32 parameters themselves."""
    module = _mixed()
    inner = Plain(module.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = _wrapped(module, inner)
    grads = [torch.full_like(p, 8 * 2.0**-12) for p in module.params]
    for param, grad in zip(module.params, grads, strict=True):
        param.grad = grad
    assert optimizer.get_loss_scale() == 8
    assert optimizer.step().success
    assert [p.dtype for p in inner.shown] == [torch.float32] * 3
    # Half of 2**-12 is less than fp16 can take from 1.
    for _, main in optimizer.main_params():
        assert bits_equal(main, torch.full_like(main, 1 - 2.0**-13))
    assert not inner.state


class Replacing(Sign):
    """An optimizer whose step makes another dict of its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step(closure)
        self.state = defaultdict(dict, self.state)


@pytest.mark.parametrize("kind", [Plain, Sign, Replacing])
def test_model_params_are_back_after_a_step(kind: type[Plain] | type[Sign]) -> None:
    """After a step the optimizer holds model params again: in groups, as keys of its state, with their gradients."""
    module = _mixed()
    inner = kind(module.parameters(), lr=0.5)
    optimizer = _wrapped(module, inner)
    for step in range(2):
        set_grads(module, seed=step)
        grads = [p.grad for p in module.params]
        optimizer.get_loss_scale()
        optimizer.step()
        assert all(held is p for held, p in zip(inner.param_groups[0]["params"], module.params, strict=True))
        assert all(p.grad is grad for p, grad in zip(module.params, grads, strict=True))
        assert all(main.grad is None or not p.is_copy for p in optimizer.live_state().main_params for main in [p.main])
        assert set(map(id, inner.state)) <= set(map(id, module.params))
    if kind is not Plain:
        assert set(map(id, inner.state)) == set(map(id, module.params))


@pytest.mark.parametrize("how", ["declared", "any", "cast"])
def test_gradients_of_another_dtype_are_back_after_a_step(how: str) -> None:
    """fp32 parameters with bf16 gradients, declared so, of any dtype, or cast since: the step sees fp32 ones."""
    module = Bag([torch.ones(4).bfloat16() if how == "cast" else torch.ones(4)])
    param = module[0]
    if how != "cast":
        param.grad_dtype = torch.bfloat16 if how == "declared" else None
    param.grad = grad = torch.full((4,), 2.0**-12).bfloat16()
    param.data = param.data.float()
    declared = param.grad_dtype
    inner = Plain(module.parameters())
    optimizer = MixedPrecisionOptimizer(inner)
    for step in range(2):
        assert optimizer.step().success
        assert bits_equal(param.detach(), torch.full((4,), 1 - (step + 1) * 2.0**-13))
        assert param.grad is grad
        assert param.grad_dtype == (None if how == "cast" else declared)


class Rateless(torch.optim.Optimizer):
    """A user-written optimizer without a learning rate."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad)


def test_learning_rate_of_any_optimizer_is_checked() -> None:
    """Of a user's optimizer too, before its step; it may have none."""
    module = Bag([torch.ones(3).half()])
    for inner in (Plain(module.parameters()), Rateless(module.parameters())):
        optimizer = _wrapped(module, inner)
        module[0].grad = torch.full((3,), 8 * 2.0**-12).half()
        optimizer.get_loss_scale()
        if isinstance(inner, Plain):
            inner.param_groups[0]["lr"] = "0.5"
            with pytest.raises(ArgumentError, match=r"lr of a param group must be a number, got '0\.5'"):
                optimizer.step()
            assert not inner.shown
            inner.param_groups[0]["lr"] = 0.5
        assert optimizer.step().success
        del optimizer


def test_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    """Where the optimizer's own step() fails, groups, state and gradients are those of the model again."""
    module = _mixed()
    inner = Plain(module.parameters())
    optimizer = _wrapped(module, inner)
    set_grads(module, seed=0)
    grads = [p.grad for p in module.params]
    inner.fails = True
    optimizer.get_loss_scale()
    with pytest.raises(RuntimeError, match="out of paper"):
        optimizer.step()
    assert all(held is p for held, p in zip(inner.param_groups[0]["params"], module.params, strict=True))
    assert all(p.grad is grad for p, grad in zip(module.params, grads, strict=True))
    inner.fails = False
    optimizer.get_loss_scale()
    assert optimizer.step().success


OPTIONS: dict[str, tuple[Any, str, Any, str]] = {
    "text": (torch.optim.RMSprop, "weight_decay", "1e-3", "weight_decay of a param group must be a number for RMSprop"),
    "None": (torch.optim.Adagrad, "lr_decay", None, "lr_decay of a param group must be a number for Adagrad, got None"),
    "one of two": (torch.optim.Adamax, "betas", (0.9,), r"betas of a param group must be 2 numbers for Adamax"),
    "two letters": (torch.optim.NAdam, "betas", "ab", r"betas of a param group must be 2 numbers for NAdam, got 'ab'"),
    "tensor of two": (torch.optim.Adadelta, "rho", torch.ones(2), "rho of a param group must be a number for Adadelta"),
}


def _in_groups(inner: Any) -> tuple[Bag, MixedPrecisionOptimizer]:
    """Return an optimizer of one param group for each parameter, after a step."""
    module = _mixed()
    optimizer = _wrapped(module, inner([{"params": [param]} for param in module.params], lr=0.1))
    set_grads(module, 0)
    optimizer.recipe.grads_are_scaled = True
    optimizer.step()
    set_grads(module, 1)
    return module, optimizer


def _held(module: Bag, optimizer: MixedPrecisionOptimizer) -> list[Tensor]:
    states = [value for param in module.params for value in optimizer.optimizer.state[param].values()]
    return [value.detach().clone() for value in (*module.params, *states, *(m for _, m in optimizer.main_params()))]


@pytest.mark.parametrize("kind", OPTIONS)
def test_option_that_torchs_step_cannot_use_is_refused(kind: str) -> None:
    """Invariant 10: torch would raise after it has updated the groups before; here no bit has changed."""
    inner, name, value, message = OPTIONS[kind]
    module, optimizer = _in_groups(inner)
    before = _held(module, optimizer)
    right = optimizer.param_groups[2][name]
    optimizer.param_groups[2][name] = value
    with pytest.raises(ArgumentError, match=message):
        optimizer.step()
    assert all(bits_equal(one, two) for one, two in zip(before, _held(module, optimizer), strict=True))
    optimizer.param_groups[2][name] = right
    assert optimizer.step().success


def test_vector_that_the_constructor_took_for_a_number_is_refused() -> None:
    """Torch's constructors take a tensor of one element for a number, their steps only where it has no dimension."""
    module = _mixed()
    eps: Any = torch.full((1,), 1e-8)
    optimizer = _wrapped(module, torch.optim.RMSprop(module.parameters(), eps=eps))
    set_grads(module, 0)
    optimizer.recipe.grads_are_scaled = True
    with pytest.raises(ArgumentError, match="eps of a param group must be a number for RMSprop, got tensor"):
        optimizer.step()


STATES: dict[str, tuple[Any, str]] = {
    "gone": (None, r"the optimizer's state of '2' has .* and lacks \['square_avg'\]; load state that is whole"),
    "longer": (torch.ones(5), r"\['square_avg'\] is of shape \(5,\), but its main param has shape \(4,\); load"),
    "number": (1.0, r"state\['2'\]\['square_avg'\] is a float, but its main param has shape \(4,\)"),
}


@pytest.mark.parametrize("kind", STATES)
def test_state_that_torchs_step_cannot_use_is_refused(kind: str) -> None:
    """Invariant 10: named before a bit changes; put right, it is used."""
    value, message = STATES[kind]
    module, optimizer = _in_groups(torch.optim.RMSprop)
    before = _held(module, optimizer)
    state = optimizer.optimizer.state[module.params[2]]
    right = state["square_avg"]
    state["square_avg"] = value
    with pytest.raises(UsageError, match=message):
        optimizer.step()
    state["square_avg"] = right
    assert all(bits_equal(one, two) for one, two in zip(before, _held(module, optimizer), strict=True))
    assert optimizer.step().success


@pytest.mark.parametrize(("option", "on"), [("momentum", 0.9), ("centered", True)])
def test_buffers_of_rmsprop_are_made_where_they_are_switched_on(option: str, on: Any) -> None:
    """As OneCycleLR and CyclicLR switch momentum on: zeros, which torch makes at a first step only."""
    found = []
    for torchs_own in (False, True):
        module, optimizer = _in_groups(torch.optim.RMSprop)
        name = "momentum_buffer" if option == "momentum" else "grad_avg"
        for group in optimizer.param_groups[1:]:
            group[option] = on
        if torchs_own:
            for param in module.params[1:]:
                optimizer.optimizer.state[param][name] = torch.zeros_like(param, dtype=torch.float32)
        assert optimizer.step().success
        assert optimizer.optimizer.state[module.params[0]].keys() == {"step", "square_avg"}
        assert optimizer.optimizer.state[module.params[1]].keys() == {"step", "square_avg", name}
        found.append(_held(module, optimizer))
    assert all(bits_equal(one, two) for one, two in zip(*found, strict=True))
