"""Optimizer state that shares memory with other state, a parameter or a gradient is refused; step counts are copied."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import ConstantGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import UsageError
from megascale.kernels import overlapping
from megascale.step import kernel_state
from tests.training import bits_equal

BACKENDS = ("native", "reference", "torch")
INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "Lion": lambda groups: Lion(groups, lr=1e-2),
}
NUMEL = 40


class _Training:
    """Three parameters that have taken a step; ``key`` is a moment that every inner optimizer here has."""

    def __init__(
        self, backend: str, inner: str = "AdamW", dtype: torch.dtype = torch.float32, *, groups: int = 1, **config: Any
    ) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(NUMEL).to(dtype)) for _ in range(3)]
        named = [(f"p{i}", param) for i, param in enumerate(self.params)]
        size = len(named) // groups
        self.inner = INNER[inner]([{"params": named[i : i + size]} for i in range(0, 3, size)])
        made = OptimizerConfig(bf16=dtype == torch.bfloat16, backend=backend, **config)
        self.optimizer = MixedPrecisionOptimizer(self.inner, made, ConstantGradScaler(1.0), grads_are_scaled=True)
        self.key = "momentum_buffer" if inner == "SGD" else "exp_avg"
        self.step()

    def give_gradients(self) -> None:
        """Give each parameter a new gradient."""
        for i, param in enumerate(self.params):
            param.grad = torch.linspace(-1, 1 + i, NUMEL).to(param.dtype)

    def step(self) -> None:
        """Take a step with new gradients."""
        self.give_gradients()
        self.optimizer.step()

    def state(self, index: int) -> dict[str, Any]:
        """Return the state of a parameter."""
        state: dict[str, Any] = self.inner.state[self.params[index]]
        return state

    def values(self) -> list[Tensor]:
        """Return copies of all parameters, gradients, state tensors and the count of landed steps."""
        grads = [param.grad for param in self.params if param.grad is not None]
        state = [value for i in range(3) for value in self.state(i).values()]
        landed = torch.tensor(int(self.optimizer.num_landed_steps))
        return [value.detach().clone() for value in (*self.params, *grads, *state, landed)]


def _a_neighbours_moment(training: _Training) -> str:
    training.state(1)[training.key] = training.state(0)[training.key]
    shared, remedy = rf"\['{training.key}'\]", rf"state\[p\]\['{training.key}'\]"
    return rf"state\['p1'\]{shared} shares .* state\['p0'\]{shared}, .* p: {remedy} = {remedy}.clone\(\)"


def _both_moments(training: _Training) -> str:
    training.state(1)["exp_avg_sq"] = training.state(1)["exp_avg"]
    return r"state\['p1'\]\['exp_avg_sq'\] shares memory with the optimizer's state\['p1'\]\['exp_avg'\]"


def _views_that_meet(training: _Training) -> str:
    memory = torch.linspace(0, 1, 2 * NUMEL - 1)
    training.state(0)[training.key], training.state(1)[training.key] = memory[:NUMEL], memory[NUMEL - 1 :]
    return rf"state\['p1'\]\['{training.key}'\] shares memory with the optimizer's state\['p0'\]\['{training.key}'\]"


def _own_data(training: _Training) -> str:
    training.state(1)[training.key] = training.params[1].data
    return rf"state\['p1'\]\['{training.key}'\] shares memory with the data of parameter 'p1'"


def _a_neighbours_data(training: _Training) -> str:
    training.state(1)[training.key] = training.params[0].data
    return rf"state\['p1'\]\['{training.key}'\] shares memory with the data of parameter 'p0'"


def _own_gradient(training: _Training) -> str:
    assert training.params[1].grad is not None
    training.state(1)[training.key] = training.params[1].grad.detach()
    return rf"state\['p1'\]\['{training.key}'\] shares memory with the gradient of 'p1'"


def _a_neighbours_gradient(training: _Training) -> str:
    assert training.params[2].grad is not None
    training.state(1)[training.key] = training.params[2].grad.detach()
    return rf"state\['p1'\]\['{training.key}'\] shares memory with the gradient of 'p2'"


def _step_in_a_moment(training: _Training) -> str:
    training.state(2)["step"] = training.state(1)["exp_avg"][3]
    return r"state\['p2'\]\['step'\] shares memory with the optimizer's state\['p1'\]\['exp_avg'\]"


def _a_step_where_a_moment_begins(training: _Training) -> str:
    training.state(0)["step"] = training.state(1)["exp_avg"][0]
    return r"state\['p[01]'\]\['\w+'\] shares memory with the optimizer's state\['p[01]'\]\['\w+'\]"


def _one_dict(training: _Training) -> str:
    training.inner.state[training.params[2]] = training.state(1)
    return rf"state\['p2'\]\['{training.key}'\] shares .* p: state\[p\] = copy.deepcopy\(state\[p\]\)"


ANY = [
    _a_neighbours_moment,
    _views_that_meet,
    _own_data,
    _a_neighbours_data,
    _own_gradient,
    _a_neighbours_gradient,
    _one_dict,
]
CASES = [(inner, share) for inner in INNER for share in ANY] + [("AdamW", _both_moments), ("AdamW", _step_in_a_moment)]
CASES += [("AdamW", _a_step_where_a_moment_begins)]


def _refused(training: _Training, match: str) -> None:
    """Expect that steps fail, time and again, and change nothing."""
    before = training.values()
    for _ in range(2):
        with pytest.raises(UsageError, match=match):
            training.optimizer.step()
        assert all(bits_equal(one, two) for one, two in zip(training.values(), before, strict=True))


def _mend(training: _Training) -> None:
    """Do what the message says, for all state."""
    for param in training.params:
        state = training.inner.state[param]
        training.inner.state[param] = {name: value.clone() for name, value in state.items()}


@pytest.mark.default(
    "SGD-_own_gradient-torch-1",
    "Lion-_own_data-reference-3",
    "AdamW-_views_that_meet-native-1",
    "SGD-_a_neighbours_gradient-torch-1",
)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("inner", "share"), CASES)
def test_state_that_shares_memory_is_refused(
    inner: str, share: Callable[[_Training], str], backend: str, groups: int
) -> None:
    """Invariants 9 and 13: no update reads what another of the step has written. Named, in one param group or between
    two, before a bit changes; with copies training goes on, as if the state had always lain apart.
    """
    training, copied = _Training(backend, inner, groups=groups), _Training(backend, inner, groups=groups)
    for one in (training, copied):
        one.give_gradients()
        match = share(one)
    _refused(training, match)
    for one in (training, copied):
        _mend(one)
        one.step()
        one.step()
    assert int(training.optimizer.num_landed_steps) == 3
    assert all(bits_equal(one, two) for one, two in zip(training.values(), copied.values(), strict=True))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keeps", ["absent", "frozen"])
def test_state_of_a_parameter_that_rests_is_not_overwritten(keeps: str, backend: str, groups: int) -> None:
    """Invariant 9: its state is another's that this step would update; step counts become separate."""
    training = _Training(backend, groups=groups)
    training.give_gradients()
    training.params[0].grad = None
    training.params[0].requires_grad_(keeps == "absent")
    _refused(training, _a_neighbours_moment(training))
    training.state(1)["exp_avg"] = training.state(1)["exp_avg"].clone()
    training.state(1)["step"] = training.state(0)["step"]
    training.optimizer.step()
    assert [float(training.state(i)["step"]) for i in range(3)] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_main_params_and_16_bit_data_are_looked_at(backend: str, remainders: bool) -> None:
    """Invariant 9: of bf16 parameters, also where main params are held as remainders."""
    training = _Training(backend, "Lion", torch.bfloat16, store_param_remainders=remainders)
    training.give_gradients()
    training.state(1)["exp_avg"] = training.params[2].data
    _refused(training, r"state\['p1'\]\['exp_avg'\] shares memory with the data of parameter 'p2'")
    if not remainders:
        training.state(1)["exp_avg"] = dict(training.optimizer.main_params())["p0"]
        _refused(training, r"state\['p1'\]\['exp_avg'\] shares memory with the main param of 'p0'")
        training.params[0].grad = None  # it rests, and is trained on later
        _refused(training, r"state\['p1'\]\['exp_avg'\] shares memory with the main param of 'p0'")
    training.state(1)["exp_avg"] = torch.zeros(NUMEL)
    training.step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_codes_are_looked_at(backend: str) -> None:
    """Invariant 9: 8-bit moments have one more state tensor."""
    training = _Training(backend, exp_avg_dtype=torch.int8)
    training.give_gradients()
    training.state(2)["exp_avg_scale"] = training.state(0)["exp_avg_scale"]
    _refused(training, r"state\['p2'\]\['exp_avg_scale'\] shares memory with .*\['p0'\]\['exp_avg_scale'\]")
    training.state(2)["exp_avg_scale"] = training.state(2)["exp_avg_scale"].clone()
    training.step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_one_storage_that_lie_apart_are_state(backend: str) -> None:
    """Invariant 9 refuses no more than it must: neighbours in one storage, interleaved columns, and no elements."""
    training, plain = _Training(backend), _Training(backend)
    memory, columns = torch.cat([training.state(i)["exp_avg"] for i in range(3)]), torch.empty(NUMEL, 3)
    for i in range(3):
        columns[:, i] = training.state(i)["exp_avg_sq"]
        training.state(i).update(exp_avg=memory[NUMEL * i :][:NUMEL], exp_avg_sq=columns[:, i])
    empty = nn.Parameter(torch.zeros(0))
    for one in (training, plain):
        one.inner.add_param_group({"params": [("empty", nn.Parameter(empty.data))]})
        none = one.inner.param_groups[-1]["params"][0]
        one.inner.state[none] = {"step": torch.tensor(0.0), "exp_avg": memory[:0], "exp_avg_sq": memory[:0]}
        none.grad = torch.zeros(0)
        one.step()
        one.step()
    assert training.state(2)["exp_avg"].data_ptr() == memory[2 * NUMEL :].data_ptr()
    assert training.state(2)["exp_avg_sq"].data_ptr() == columns[:, 2].data_ptr()
    assert all(torch.allclose(one, two, rtol=1e-6) for one, two in zip(training.values(), plain.values(), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_in_which_nothing_moved_looks_for_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are compared where a state tensor is another one or has moved, and only then."""
    calls: list[int] = []

    def counted(tensors: Any) -> list[int]:
        calls.append(len(tensors))
        return overlapping(tensors)

    training = _Training(backend, groups=3)
    monkeypatch.setattr(kernel_state, "overlapping", counted)
    for _ in range(3):
        training.step()
    assert not calls
    training.state(1)["exp_avg"] = training.state(1)["exp_avg"].clone()
    training.step()
    found = len(calls)
    assert found
    training.state(1)["exp_avg"].data = training.state(1)["exp_avg"].data.clone()
    training.step()
    assert len(calls) == 2 * found
    training.step()
    assert len(calls) == 2 * found
