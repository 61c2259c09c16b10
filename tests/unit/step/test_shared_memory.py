"""Parameters that are listed twice, or share memory; a step count for all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError, UsageError
from megascale.kernels import sharing
from tests.training import bits_equal

BACKENDS = ("native", "reference", "torch")


class _Training:
    """Two steps of AdamW on one backend."""

    def __init__(self, backend: str, dtype: torch.dtype = torch.float16, *, groups: int = 1) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(8).to(dtype)) for _ in range(3)]
        named = [(f"p{i}", param) for i, param in enumerate(self.params)]
        size = len(named) // groups
        self.inner = torch.optim.AdamW([{"params": named[i : i + size]} for i in range(0, 3, size)], lr=1e-2)
        config = OptimizerConfig(fp16=dtype == torch.float16, backend=backend)
        self.optimizer = MixedPrecisionOptimizer(self.inner, config, ConstantGradScaler(4.0))
        self.step()

    def step(self) -> None:
        """Take a step with gradients of 1, 2 and 3."""
        self.optimizer.zero_grad()
        losses = [param.float().sum() * (i + 1) for i, param in enumerate(self.params)]
        self.optimizer.scale_loss(torch.stack(losses).sum()).backward()
        self.optimizer.step()

    def state(self, index: int) -> dict[str, Any]:
        """Return the state of a parameter."""
        state: dict[str, Any] = self.inner.state[self.params[index]]
        return state


def _a_neighbours_step(training: _Training) -> None:
    training.state(1)["step"] = training.state(0)["step"]


@pytest.mark.native
def test_one_step_count_for_all_groups_counts_each_step_once() -> None:
    """A state dict may hold one ``step`` tensor for all parameters; in groups of their own they advance by one."""
    for backend in BACKENDS:
        training = _Training(backend, groups=3)
        _a_neighbours_step(training)
        training.state(2)["step"] = training.state(0)["step"]
        training.step()
        assert [float(training.state(i)["step"]) for i in range(3)] == [2.0, 2.0, 2.0]


def _tie(training: _Training) -> None:
    training.params[1].data = training.params[0].data


def _tie_partly(training: _Training) -> None:
    memory = torch.linspace(-1, 1, 9).to(training.params[0].dtype)
    training.params[0].data, training.params[2].data = memory[:8], memory[1:]


@pytest.mark.default(
    "reference-dtype0-_tie-3",
    "native-dtype1-_tie_partly-1",
    "torch-dtype0-_tie_partly-1",
    "reference-dtype1-_tie_partly-3",
)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("tie", [_tie, _tie_partly])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_share_memory_are_refused(
    backend: str, dtype: torch.dtype, tie: Callable[[_Training], None], groups: int
) -> None:
    """Invariant 9: each would have a main param of its own and undo the other's update. Named before a bit changes;
    once they lie apart again training goes on.
    """
    training = _Training(backend, dtype, groups=groups)
    tie(training)
    held = [*training.params, *(value for i in range(3) for value in training.state(i).values())]
    before = [value.detach().clone() for value in held]
    other = "p1" if tie is _tie else "p2"
    for _ in range(2):
        with pytest.raises(UsageError, match=f"parameters 'p0' and '{other}' share memory, which two updates"):
            training.step()
        assert all(bits_equal(value.detach(), old) for value, old in zip(held, before, strict=True))
    for param in training.params:
        param.data = param.data.clone()
    training.step()
    assert not bits_equal(training.params[0].detach(), before[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_of_one_matrix_are_parameters(backend: str) -> None:
    """Views that interleave share no element."""
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for parts in (matrix.clone().split(2, 1), [part.clone() for part in matrix.split(2, 1)]):
        params = [nn.Parameter(part) for part in parts]
        optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=0.1), OptimizerConfig(backend=backend))
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        found.append([param.detach().contiguous() for param in params])
    assert all(torch.allclose(one, two, rtol=1e-6) for one, two in zip(*found, strict=True))
    assert not torch.equal(found[0][0], matrix[:, :2])


def test_sharing_finds_the_bytes_that_two_tensors_have_in_common() -> None:
    """Whole, partly, or as rows that cross columns; of several dtypes."""
    memory = torch.zeros(6, 4)
    flat = memory.view(-1)
    assert sharing([memory[:, :2], memory[:, 2:]]) == []
    assert sharing([memory[:, 1:3], memory[:2], memory[4:, 3:]]) == [0, 1]
    assert sharing([flat[12:], memory[:2], flat[5:7]]) == [1, 2]
    assert sharing([flat[:4], flat[4:8], flat.view(torch.uint8)[15:16]]) == [0, 2]
    assert sharing([memory, torch.zeros(4), memory[:0]]) == []
    assert sharing([memory.half(), memory[1], memory[:, ::2].t(), memory[:, 1::2]]) == [1, 2]
    assert sharing([flat[8:], flat[:8], flat[:0]]) == []  # they touch


def test_sharing_names_the_same_pair_wherever_it_lies() -> None:
    """Two ranks, or two backends, raise the same error: the lower indices decide, not the addresses."""
    low, high = torch.zeros(16).split(8)
    assert sharing([low, high, high, low]) == [1, 2]
    assert sharing([high, low, low, high]) == [1, 2]
    assert sharing([high[4:], low[4:], high, low]) == sharing([low[4:], high[4:], low, high]) == [0, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameter_that_is_listed_twice_is_refused(backend: str) -> None:
    """Invariant 10: in one group or in two, before anything has changed."""
    for groups in (1, 2):
        training = _Training(backend)
        before = [param.detach().clone() for param in training.params]
        if groups == 1:
            training.inner.param_groups[0]["params"].append(training.params[1])
        else:
            group = {**training.inner.param_groups[0], "params": [training.params[1]], "param_names": ["p1"]}
            training.inner.param_groups.append(group)
        with pytest.raises(
            ArgumentError, match=rf"param_groups\[{groups - 1}\] holds 'p1' that param_groups held before"
        ):
            training.step()
        assert all(bits_equal(p.detach(), old) for p, old in zip(training.params, before, strict=True))


def test_parameter_that_is_listed_twice_is_named_at_construction() -> None:
    """Invariant 10: no main param has its name yet; it is that of ``named_parameters``."""
    module = nn.Linear(2, 2).bfloat16()
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    inner.param_groups.append({**inner.param_groups[0], "params": [module.weight]})
    with pytest.raises(ArgumentError, match=r"param_groups\[1\] holds 'weight' that param_groups held before"):
        MixedPrecisionOptimizer(inner, named_parameters=module.named_parameters())


def test_group_with_too_few_names_is_refused() -> None:
    """A parameter that was put into a group by hand has no name there."""
    training = _Training("reference")
    training.inner.param_groups[0]["params"].append(nn.Parameter(torch.zeros(4).half()))
    with pytest.raises(ArgumentError, match="a param group has 4 params and 3 param_names"):
        training.step()
