"""Optimizers that run their own step() on main params: what they are shown, and what is put back."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import ConstantGradScaler, MixedPrecisionOptimizer
from megascale.errors import InnerStepError
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
        assert all(main.grad is None or not p.is_copy for p in optimizer._live_state().main_params for main in [p.main])
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


class Regrouping(Plain):
    """Adds a param group in its step, removes one, or gives a parameter memory of another shape."""

    does = ""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step(closure)
        if self.does == "add":
            self.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        elif self.does == "remove":
            self.param_groups.pop()
        elif self.does == "reshape":
            self.param_groups[0]["params"][0].data = torch.zeros(2, 2)


@pytest.mark.parametrize("does", ["add", "remove", "reshape"])
def test_param_groups_are_back_whatever_a_step_does_to_them(does: str) -> None:
    """They list the model params again, so that no later step trains nothing; what was added is named."""
    module = _mixed()
    inner = Regrouping([{"params": [p]} for p in module.params])
    optimizer = _wrapped(module, inner)
    set_grads(module, seed=0)
    inner.does = does
    optimizer.get_loss_scale()
    with pytest.raises(InnerStepError, match="must match the size" if does == "reshape" else "added or removed"):
        optimizer.step()
    assert all(main.shape == p.shape for (_, main), p in zip(optimizer.main_params(), module.params, strict=True))
    assert [[id(p) for p in group["params"]] for group in inner.param_groups] == [[id(p)] for p in module.params]


WRONG: dict[str, tuple[str, Any]] = {
    "an option": ("option", None),
    "no state": ("state", None),
    "state of another shape": ("state", torch.ones(5)),
    "state expanded": ("state", torch.ones(1).expand(4)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_torchs_step_cannot_use_is_its_error(wrong: str) -> None:
    """InnerStepError with torch's own words; what it has updated before stays, rounded into its model params. Put right
    and loaded anew, training goes on.
    """
    module = _mixed()
    groups = [{"params": [param]} for param in module.params]
    optimizer = _wrapped(module, torch.optim.RMSprop(groups, lr=0.1))
    set_grads(module, 0)
    optimizer._recipe.grads_are_scaled = True
    optimizer.step()
    saved, weights = optimizer.state_dict(), {name: value.clone() for name, value in module.state_dict().items()}
    set_grads(module, 1)
    where, value = WRONG[wrong]
    if where == "option":
        optimizer.param_groups[2]["alpha"] = value
    else:
        optimizer._inner.state[module.params[2]]["square_avg"] = value
    with pytest.raises(InnerStepError, match=r"RMSprop.step\(\) raised \w+: .*; some main params may be updated"):
        optimizer.step()
    for (_, main), param in zip(optimizer.main_params(), module.params, strict=True):
        assert bits_equal(main.to(param.dtype), param.detach())
    optimizer.param_groups[2]["alpha"] = 0.99
    module.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    assert optimizer.step().success
