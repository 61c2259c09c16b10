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

pytestmark = pytest.mark.usefixtures("reader")


@pytest.mark.default(
    "guards-native-number", "guards-torch-float64", "guards-reference-int64", "guards-native-one_dimension"
)
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
    "guards-native-cleared_sgd",
    "guards-reference-rate_of_shape_1",
    "guards-torch-cleared_adamw",
    "guards-reference-integer_rate",
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


@pytest.mark.native
def test_amsgrad_is_switched_on() -> None:
    """Torch's own step then raises KeyError; here the largest second moment starts at the next step."""
    training = Training("native")
    training.step(2)
    training.inner.param_groups[0]["amsgrad"] = True
    training.step(2)
    for param in training.params:
        assert torch.equal(
            training.inner.state[param]["max_exp_avg_sq"] >= training.inner.state[param]["exp_avg_sq"],
            torch.ones(param.shape, dtype=torch.bool),
        )


@pytest.mark.native
@pytest.mark.parametrize("policy", ["OneCycleLR", "CyclicLR"])
def test_schedules_that_move_momentum_run(policy: str) -> None:
    """Both raise SGD's momentum from 0 by default, after the optimizer was wrapped."""
    training = Training("native", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.0))
    training.inner.defaults["momentum"] = 0.0
    if policy == "OneCycleLR":
        schedule: Any = torch.optim.lr_scheduler.OneCycleLR(training.inner, max_lr=0.1, total_steps=10)
    else:
        schedule = torch.optim.lr_scheduler.CyclicLR(training.inner, base_lr=0.01, max_lr=0.1)
    for _ in range(3):
        training.step()
        schedule.step()
    assert all("momentum_buffer" in training.inner.state[param] for param in training.params)


BAD_OPTIONS: dict[str, tuple[str, Any]] = {
    "rate_of_two": ("lr", torch.tensor([0.1, 0.2])),
    "complex_rate": ("lr", torch.tensor(1j)),
    "rate_without_memory": ("lr", torch.tensor(0.1, device="meta")),
    "sparse_rate": ("lr", torch.tensor([0.1]).to_sparse()),
    "text_rate": ("lr", "0.1"),
    "no_rate": ("lr", None),
    "text_decay": ("weight_decay", "0.1"),
    "one_beta": ("betas", (0.9,)),
    "text_betas": ("betas", "ab"),
    "no_eps": ("eps", None),
}


@pytest.mark.default("guards-no_rate", "guards-sparse_rate", "guards-text_rate", "guards-rate_without_memory")
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


@pytest.mark.native
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torch.optim.AdamW, "lr"),
        (torch.optim.AdamW, "eps"),
        (torch.optim.AdamW, "amsgrad"),
        (torch.optim.SGD, "momentum"),
        (torch.optim.SGD, "nesterov"),
        (Lion, "maximize"),
    ],
)
def test_option_that_lacks_is_refused(kind: type[torch.optim.Optimizer], name: str) -> None:
    """Taken out of a group, or not in one that was appended to the list: named, and neither group has changed."""
    training = Training("native", lambda ps: kind([{"params": ps[:2]}, {"params": ps[2:]}], lr=0.1))  # type: ignore[call-arg]
    training.step()
    before = training.inner.param_groups[1].pop(name)
    training.backward()
    training.refused(ArgumentError, f"a param group lacks '{name}'; set them, or add the group by add_param_group")
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
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("entry", [None, []])
def test_state_that_is_no_dict_is_refused(kind: type[torch.optim.Optimizer], entry: Any) -> None:
    """Also of an optimizer that runs its own step: the parameter is named, and nothing has changed."""
    training = Training("native", lambda params: kind(params, lr=0.01))  # type: ignore[call-arg]
    training.step()
    kept = training.inner.state[training.params[1]]
    training.inner.state[training.params[1]] = entry
    training.backward()
    before = [param.detach().clone() for param in training.params]
    with pytest.raises(UsageError, match=f"state of '1' is a {type(entry).__name__}, not a dict"):
        training.optimizer.step()
    assert all(map(torch.equal, training.params, before))
    training.inner.state[training.params[1]] = kept
    training.optimizer.step()


def test_a_step_count_for_all_parameters_becomes_one_for_each(backend: str) -> None:
    """Loaded state may hold one tensor for all: counted once for each, it would run ahead."""
    training, left = Training(backend), Training(backend)
    for one, is_shared in ((training, True), (left, False)):
        torch.manual_seed(1)
        one.step(2)
        count = torch.tensor(2.0)
        for param in one.params:
            one.inner.state[param]["step"] = count if is_shared else count.clone()
        one.step(2)
    assert same_training(training, left)


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
