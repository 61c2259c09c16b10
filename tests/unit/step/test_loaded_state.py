"""``load_state_dict()`` of the wrapped optimizer itself: its state stays what was given."""

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from megascale import ChainedOptimizer, MixedPrecisionOptimizer, OptimizerConfig
from megascale.utils.dtensors import to_local
from tests.cells import CELLS, Cell, Named, adamw, integers
from tests.pool import RankPool
from tests.training import bits_equal


def _states(inner: torch.optim.Optimizer) -> list[Tensor]:
    return [to_local(value).clone() for state in inner.state.values() for value in state.values()]


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(bits_equal, one, other))


@pytest.mark.default("float32-replicated-fp32", "float16-zero1-compact", "bfloat16-fsdp2-compact", "float32-fsdp2-fp32")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_state_is_loaded_as_it_was_given(cell: Cell, ranks: RankPool) -> None:
    """Counts, moments and scales, whose second moments fp16 would make 0, and the next step is that of a run that went
    on; the saved tensors are not those that are trained.
    """
    for found in ranks.run(cell.world_size, _loaded, cell):
        assert found == (True, True, True)


def _loaded(cell: Cell, chained: bool = False) -> tuple[bool, bool, bool]:
    lives, given = [], []
    for loads in (False, True):
        model = cell.model()
        optimizer = cell.optimizer(model)
        stepping = ChainedOptimizer([optimizer]) if chained else optimizer
        for step in range(4):
            if step == 3:
                saved = deepcopy(optimizer._inner.state_dict())
                untouched = deepcopy(saved)
                before = _states(optimizer._inner)
                if loads:
                    optimizer._inner.load_state_dict(saved)
                    given.append(_alike(before, _states(optimizer._inner)))
            loss = model([grad * 2.0**-9 for grad in integers(cell.shapes, step)])
            stepping.scale_loss(loss).backward()
            stepping.step()
            stepping.zero_grad()
        lives.append(_states(optimizer._inner) + [to_local(weight.detach()) for weight in model.parameters()])
        kept = [
            [to_local(value).clone() for state in one["state"].values() for value in state.values()]
            for one in (saved, untouched)
        ]
        given.append(_alike(*kept))
    return given[1], _alike(*lives), given[0] and given[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_is_loaded_into_an_optimizer_of_a_chain(dtype: torch.dtype) -> None:
    """As by itself."""
    assert _loaded(Cell(dtype, "replicated"), chained=True) == (True, True, True)


@pytest.mark.parametrize("inner", ["adamw_fused", "nadam", "nested"])
def test_what_is_no_moment_of_one_parameter_is_loaded_too(inner: str) -> None:
    """A count of a fused step, which torch has in fp32; state of an optimizer that runs its own step, nested
    state, integers and state that belongs to no parameter.
    """
    makers: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
        "adamw_fused": lambda named: torch.optim.AdamW(named, fused=True),
        "nadam": torch.optim.NAdam,
        "nested": _Nested,
    }
    cell = Cell(torch.float16, "replicated")
    model = cell.model()
    optimizer = cell.optimizer(model, makers[inner], grads_are_scaled=True)
    for step in range(2):
        cell.backward(optimizer, model, integers(cell.shapes, step))
        optimizer.step()
        optimizer.zero_grad()
    own = optimizer._inner
    before = _flat(deepcopy(own.state_dict())["state"])
    own.load_state_dict(deepcopy(own.state_dict()))
    after = _flat(own.state_dict()["state"])
    assert [key for key, _ in before] == [key for key, _ in after]
    for (key, one), (_, other) in zip(before, after, strict=True):
        is_same = bits_equal(one, other) if isinstance(one, Tensor) else one == other
        assert is_same, key


def _flat(nest: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(nest, dict):
        return [pair for key, value in nest.items() for pair in _flat(value, f"{path}.{key}")]
    if isinstance(nest, (list, tuple)):
        return [pair for key, value in enumerate(nest) for pair in _flat(value, f"{path}.{key}")]
    return [(path, nest)]


class _Nested(torch.optim.SGD):
    """Keeps lists, integers and state of no parameter."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=1e-3)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Keep a small fp32 number, which fp16 does not have."""
        for group in self.param_groups:
            for param in group["params"]:
                tiny = torch.full_like(param, 1e-9, dtype=torch.float32)
                self.state[param] = {
                    "old": [tiny, (tiny * 2,)],
                    "count": torch.tensor(7),
                    "name": "x",
                    "in": {"a": tiny},
                }
        self.state["all"] = {"k": 3}  # type: ignore[index]


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad])
def test_moments_of_16_bit_weights_are_loaded_in_fp32(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """A run of plain bf16 weights goes on with main params, whose moments are fp32."""
    param = torch.nn.Parameter(torch.ones(4).bfloat16())
    plain = kind([param])
    param.grad = torch.full_like(param, 0.5)
    plain.step()
    inner = kind([param])
    optimizer = MixedPrecisionOptimizer(inner)
    inner.load_state_dict(plain.state_dict())
    assert optimizer.step().success
    assert {value.dtype for value in inner.state[param].values()} == {torch.float32}


def test_groups_that_do_not_fit_are_torchs_error_and_change_nothing() -> None:
    """With the message of torch."""
    cell = Cell(torch.float16, "replicated")
    model = cell.model()
    optimizer = cell.optimizer(model)
    cell.backward(optimizer, model, integers(cell.shapes, 0))
    optimizer.step()
    before = _states(optimizer._inner)
    saved = optimizer._inner.state_dict()
    saved["param_groups"][0]["params"] = saved["param_groups"][0]["params"][:-1]
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer._inner.load_state_dict(saved)
    assert _alike(before, _states(optimizer._inner))


def test_the_hook_goes_with_its_wrapper() -> None:
    """Invariant 11: the wrapped optimizer does not keep its wrapper, and casts as torch does without it."""
    model = torch.nn.Linear(4, 4).bfloat16()
    inner = adamw(list(model.named_parameters()))
    for _ in range(2):  # wrapped again, it has one hook again
        optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(bf16=True))
        assert len(inner._optimizer_load_state_dict_pre_hooks) == 1
        model(torch.ones(1, 4).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dropped = ref(optimizer)
        del optimizer
        gc.collect()
        assert dropped() is None
        assert not inner._optimizer_load_state_dict_pre_hooks
    inner.load_state_dict(deepcopy(inner.state_dict()))
    assert inner.state[model.weight]["exp_avg"].dtype == torch.bfloat16
