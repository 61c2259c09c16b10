"""Options and state that change between steps: made as torch makes them, or refused by name."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import DynamicGradScaler, Lion, MixedPrecisionOptimizer
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from tests.training import bits_equal
from tests.unit.kernels.memory_cases import SHAPES, Make, Training, same_training


@pytest.mark.default("native-number", "torch-float64", "reference-int64", "native-one_dimension")
@pytest.mark.parametrize("steps", ["number", "float64", "int64", "one_dimension", "float16"])
def test_step_counts_are_read_as_numbers_of_any_type(steps: str, backend: str) -> None:
    """Older torch kept numbers, inner.load_state_dict() keeps any dtype: their bits are not taken for fp32's."""
    change: dict[str, Callable[[Tensor], Any]] = {
        "number": float,
        "float64": Tensor.double,
        "int64": Tensor.long,
        "one_dimension": lambda t: t.reshape(1),
        "float16": Tensor.half,
    }
    changed, left = Training(backend), Training(backend)
    for training in (changed, left):
        torch.manual_seed(1)
        training.step(3)
        if training is changed:
            for state in changed.inner.state.values():
                state["step"] = change[steps](state["step"])
        training.step(2)
    assert same_training(changed, left)
    assert all(bits_equal(s["step"], torch.tensor(5.0)) for s in changed.inner.state.values())


def _trained_by_torch(make: Make, change: Callable[[torch.optim.Optimizer], None], after: int) -> list[Tensor]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    inner = make(params)
    torch.manual_seed(1)
    for index in range(after + 3):
        if index == after:
            change(inner)
        for param in params:
            param.grad = torch.randn(param.shape)
        inner.step()
    return params  # type: ignore[return-value]


def _set_option(name: str, value: Any) -> Callable[[torch.optim.Optimizer], None]:
    def change(inner: torch.optim.Optimizer) -> None:
        for group in inner.param_groups:
            group[name] = value

    return change


def _replace_state(inner: torch.optim.Optimizer) -> None:
    inner.state = defaultdict(dict)


CHANGES: dict[str, tuple[Make, Callable[[torch.optim.Optimizer], None]]] = {
    "momentum": (lambda ps: torch.optim.SGD(ps, lr=0.1), _set_option("momentum", 0.9)),
    "momentum_dampened": (lambda ps: torch.optim.SGD(ps, lr=0.1, dampening=0.5), _set_option("momentum", 0.9)),
    "dampening": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), _set_option("dampening", 0.5)),
    "cleared_adamw": (lambda ps: torch.optim.AdamW(ps, lr=0.1), lambda inner: inner.state.clear()),
    "cleared_sgd": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), lambda inner: inner.state.clear()),
    "replaced_adamw": (lambda ps: torch.optim.AdamW(ps, lr=0.1), _replace_state),
    "replaced_lion": (lambda ps: Lion(ps, lr=0.1), _replace_state),
    "rate_of_shape_1": (lambda ps: torch.optim.AdamW(ps, lr=0.1), _set_option("lr", torch.tensor([0.5]))),
    "bf16_rate": (lambda ps: torch.optim.SGD(ps, lr=0.1), _set_option("lr", torch.tensor(0.5).bfloat16())),
    "rate_of_shape_1_1": (lambda ps: torch.optim.SGD(ps, lr=0.1), _set_option("lr", torch.tensor([[0.5]]))),
    "integer_rate": (lambda ps: torch.optim.SGD(ps, lr=0.1), _set_option("lr", torch.tensor(1))),
}


@pytest.mark.default(
    "native-cleared_sgd",
    "reference-rate_of_shape_1",
    "torch-cleared_adamw",
    "reference-integer_rate",
)
@pytest.mark.parametrize("change", CHANGES)
def test_options_and_state_change_as_with_torch(change: str, backend: str) -> None:
    """Momentum raised from 0, state cleared or replaced, any kind of rate: the next step is torch's next step."""
    make, apply = CHANGES[change]
    theirs = _trained_by_torch(make, apply, after=2)
    ours = Training(backend, make, torch.float32)
    torch.manual_seed(1)
    ours.step(2)
    apply(ours.optimizer)
    ours.step(3)
    for mine, their in zip(ours.params, theirs, strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-6)


BAD_OPTIONS: dict[str, tuple[str, Any]] = {
    "rate_of_two": ("lr", torch.tensor([0.1, 0.2])),
    "complex_rate": ("lr", torch.tensor(1j)),
    "text_rate": ("lr", "0.1"),
    "no_rate": ("lr", None),
    "text_decay": ("weight_decay", "0.1"),
    "one_beta": ("betas", (0.9,)),
    "text_betas": ("betas", "ab"),
    "no_eps": ("eps", None),
}


@pytest.mark.default("no_rate", "text_rate")
@pytest.mark.native
@pytest.mark.parametrize("bad", BAD_OPTIONS)
def test_option_of_a_wrong_type_is_refused(bad: str) -> None:
    """In the second of two groups: the error names the option, and neither group nor the scale has changed."""
    name, value = BAD_OPTIONS[bad]
    training = Training("native", lambda ps: torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:]}], lr=0.1))
    training.step()
    before = training.inner.param_groups[1][name]
    training.inner.param_groups[1][name] = value
    training.backward()
    training.refused(ArgumentError, name)
    training.inner.param_groups[1][name] = before
    training.optimizer.step()


@pytest.mark.parametrize("kind", [tuple, iter])
def test_params_of_a_group_may_be_any_sequence(kind: Callable[[list[Any]], Any]) -> None:
    """Torch steps a tuple; the library that reads many at once reads lists, and would read past the end of others."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5))
    for param in params:
        param.grad = torch.zeros(2)
    optimizer.step()
    optimizer.param_groups[0]["params"] = kind(params)
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    assert all(torch.equal(param, torch.full((2,), 0.5)) for param in params)


@pytest.mark.native
@pytest.mark.parametrize(("params", "message"), [(None, "got a NoneType"), (["a"], "holds a str")])
def test_params_of_a_group_that_are_none_are_refused(params: Any, message: str) -> None:
    """Named, before a bit changes."""
    training = Training("native")
    training.step()
    before = training.inner.param_groups[0]["params"]
    training.inner.param_groups[0]["params"] = params
    training.refused(ArgumentTypeError, f"params of a param group .*{message}")
    training.inner.param_groups[0]["params"] = before
    training.step()


def test_expanded_parameter_is_refused() -> None:
    """At construction: an update would write an element several times."""
    param = nn.Parameter(torch.ones(1).half().expand(4))
    with pytest.raises(ArgumentError, match="parameter '0' has elements that share memory, as expand"):
        MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.1), grad_scaler=DynamicGradScaler())


@pytest.mark.native
def test_state_that_is_not_whole_is_refused() -> None:
    """Of Adam's moments one was deleted: torch raises KeyError, here the error names the parameter."""
    training = Training("native")
    training.step()
    del training.inner.state[training.params[1]]["exp_avg_sq"]
    training.backward()
    training.refused(UsageError, r"state of '1' has \['exp_avg', 'step'\] and lacks \['exp_avg_sq'\]")
    training.inner.state[training.params[1]] = {}
    training.optimizer.step()
