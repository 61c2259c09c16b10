"""Param groups that one call of a kernel updates together, beside the reference, which takes them one by one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton")

from megascale import DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.kernels import SgdHyper
from megascale.kernels.triton.backend import TritonBackend
from megascale.rules import AdamHyper, LionHyper
from tests.training import bits_equal

KINDS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.5, dampening=0.25),
    "lion": Lion,
}
HOLDS: list[dict[str, Any]] = [{}, {"store_param_remainders": True}, {"exp_avg_dtype": torch.bfloat16}]
RATES: st.SearchStrategy[Any] = st.sampled_from(
    [2.0**-7, 1e-3, 0.3, torch.tensor(0.1), torch.tensor(0.3, dtype=torch.float64)]
)
OTHERS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "adamw": st.fixed_dictionaries({"betas": st.sampled_from([(0.9, 0.99), (0.5, 0.9)]), "amsgrad": st.booleans()}),
    "adam": st.fixed_dictionaries({"eps": st.sampled_from([1e-8, 0.5]), "maximize": st.booleans()}),
    "sgd": st.fixed_dictionaries({"momentum": st.sampled_from([0.0, 0.5]), "dampening": st.sampled_from([0.0, 0.25])}),
    "lion": st.fixed_dictionaries({"betas": st.sampled_from([(0.9, 0.99), (0.5, 0.9)])}),
}
"""Options that keep groups apart. Seldom drawn: most groups differ in what one call may differ in."""


@st.composite
def lives(draw: st.DrawFn) -> tuple[str, dict[str, Any], torch.dtype, list[list[dict[str, Any]]], list[set[int]]]:
    """Draw an optimizer, how it holds state, the dtype of some parameters, options of its groups before each step, and
    what has no gradient then. fp64 parameters no kernel can read.
    """
    kind, count = draw(st.sampled_from(sorted(KINDS))), draw(st.integers(1, 5))

    def options() -> dict[str, Any]:
        own = {"lr": draw(RATES), "weight_decay": draw(st.sampled_from([0.0, 0.0625, 0.3]))}
        return own | draw(OTHERS[kind]) if draw(st.integers(0, 2)) == 2 else own

    first = [options() for _ in range(count)]
    steps = [first, *(draw(st.sampled_from([first, [options() for _ in range(count)]])) for _ in range(2))]
    missing = [draw(st.sets(st.integers(0, 2 * count - 1), max_size=2)) for _ in steps]
    wide = draw(st.sampled_from([torch.float32, torch.float32, torch.float64]))
    return kind, draw(st.sampled_from(HOLDS)), wide, steps, missing


@settings(max_examples=25, deadline=None)
@given(lives())
def test_groups_together_have_the_bits_of_each_alone(
    life: tuple[str, dict[str, Any], torch.dtype, list[list[dict[str, Any]]], list[set[int]]],
) -> None:
    """Invariant 3: also with groups of other rates, weight decays and further options, which change between steps."""
    kind, holds, wide, steps, missing = life
    trained = []
    for backend in ("triton", "reference"):
        # Of each group one parameter in fp16, and one in a dtype in which it is its own main param.
        params = [
            nn.Parameter(torch.linspace(-1, 1 + at, 33 + at, dtype=wide if at % 2 else torch.float16))
            for at in range(2 * len(steps[0]))
        ]
        inner = KINDS[kind]([{"params": params[at : at + 2]} for at in range(0, len(params), 2)])
        config = OptimizerConfig(fp16=True, backend=backend, **holds)
        optimizer = MixedPrecisionOptimizer(inner, config, DynamicGradScaler(4.0, 1.0, 2.0, 0.5, 1000, 1))
        for step, (options, absent) in enumerate(zip(steps, missing, strict=True)):
            for group, own in zip(inner.param_groups, options, strict=True):
                group.update(own)
            for at, param in enumerate(params):
                param.grad = None if at in absent else torch.cos(torch.arange(33 + at) + step).to(param.dtype)
            if step == 1 and params[0].grad is not None:
                params[0].grad[3] = torch.inf  # skipped
            optimizer.get_loss_scale()
            if any(param.grad is not None for param in params):
                optimizer.step()
        states = [
            value for param in params for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)
        ]
        trained.append([*params, *states])
    assert all(bits_equal(ours.detach(), theirs.detach()) for ours, theirs in zip(*trained, strict=True))


def test_what_one_call_takes_together() -> None:
    """All but rates and weight decays must be equal; of a decay that goes through gradients, whether there is one."""
    backend = TritonBackend()
    adam = AdamHyper(1e-3, 0.9, 0.99, 1e-8, 0.1, decoupled=False, amsgrad=False, maximize=False)
    adamw = AdamHyper(1e-3, 0.9, 0.99, 1e-8, 0.1, decoupled=True, amsgrad=False, maximize=False)
    sgd = SgdHyper(1e-3, 0.9, 0.0, 0.1, nesterov=False, maximize=False)
    lion = LionHyper(1e-3, 0.9, 0.99, 0.1, maximize=False)

    def together(hyper: Any, **changes: Any) -> bool:
        changed = type(hyper)(**(vars(hyper) | changes))
        return backend.kind_of(hyper) == backend.kind_of(changed)

    for hyper in (adam, adamw, sgd, lion):
        assert together(hyper, lr=0.5, weight_decay=0.25)
        assert together(hyper, weight_decay=0.0) == (hyper in (adamw, lion))
        assert not together(hyper, lr=torch.tensor(0.5))  # on the device: it is read there
        assert not together(hyper, maximize=True)
    assert [together(adam, beta1=0.5), together(adam, eps=0.5), together(sgd, momentum=0.5)] == [False] * 3
    assert backend.kind_of(object()) != backend.kind_of(object())  # type: ignore[arg-type]
