"""What an optimizer's own state_dict() has beside `state` and `param_groups` is saved and loaded, bit by bit.

The cells: {fp16, bf16, fp32} x {replicated, sharded by parameters, FSDP2} with fp32 state, and by elements for those
that the caller says are elementwise. An optimizer that runs its own step() has no 8-bit moments.
"""

import copy
import io
from collections import deque
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import ChainedOptimizer, MixedPrecisionOptimizer
from megascale.checkpoint import Checkpointer
from megascale.errors import ArgumentError, StateDictError, UsageError
from tests.cells import SHAPES, Cell, Given, Named, integers
from tests.fsdp2_cases import whole
from tests.own_methods import Lookahead, Warming, values_in
from tests.pool import RankPool
from tests.training import bits_equal

KINDS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "lookahead": lambda named: Lookahead(torch.optim.AdamW(named, lr=2.0**-5)),
    "warming": Warming,
    "both": lambda named: Lookahead(Warming(named)),
}
OWN_CELLS = [
    Cell(dtype, layout)
    for dtype, layout in product(
        (torch.float16, torch.bfloat16, torch.float32), ("replicated", "zero1", "zero1-parameters", "fsdp2")
    )
]
WAYS = ("state dict", "file", "checkpoint")


def test_an_optimizer_in_a_dict_trains() -> None:
    """It stepped the 16-bit weights, over which main params were rounded: success=True, and nothing moved."""

    class ByName(torch.optim.Optimizer):
        def __init__(self, named: Named) -> None:
            named = list(named)
            self.optimizers = {"a": [torch.optim.AdamW(named, lr=2.0**-5)]}
            super().__init__(named, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizers["a"][0].step()

    weight, plain = nn.Parameter(torch.ones(4).bfloat16()), nn.Parameter(torch.ones(4))
    optimizer = MixedPrecisionOptimizer(ByName([("weight", weight)]))
    alone = torch.optim.AdamW([plain], lr=2.0**-5)
    weight.grad, plain.grad = torch.ones_like(weight), torch.ones_like(plain)
    assert optimizer.step().success
    alone.step()
    assert torch.equal(dict(optimizer.main_params())["weight"], plain)
    saved = optimizer.state_dict()["optimizer"]["state"]["weight"]
    assert torch.equal(saved["optimizers.a.0.exp_avg"], alone.state[plain]["exp_avg"])


def test_lists_that_hold_themselves() -> None:
    """An optimizer's lists are searched for other optimizers, each once: a list in itself was a RecursionError."""

    class Cyclic(Lookahead):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner)
            self.log: list[Any] = [([inner],)]
            self.log += [self.log, (self, self.log)]

    param = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = MixedPrecisionOptimizer(Cyclic(torch.optim.AdamW([param], lr=2.0**-5)))
    param.grad = torch.ones_like(param)
    assert optimizer.step().success
    assert optimizer.state[param]["optimizer.exp_avg"].dtype == torch.float32


def _step(cell: Cell, model: nn.Module, optimizer: Any, step: int) -> None:
    cell.backward(optimizer, model, integers(cell.shapes, step))
    assert optimizer.step().success
    optimizer.zero_grad()


def _build(cell: Cell, kind: str) -> tuple[Any, Any]:
    model = cell.model()
    options: dict[str, Any] = {"shard": "elements", "elementwise": True} if cell.layout == "zero1" else {}
    return model, cell.optimizer(model, KINDS[kind], **options)


def _resume(cell: Cell, kind: str, way: str, folder: str) -> list[bool]:
    """Return, per weight and main param, whether a run that was resumed has the bits of one that was not."""
    model, optimizer = _build(cell, kind)
    for step in range(3):
        _step(cell, model, optimizer, step)
    other, resumed = _build(cell, kind)
    if way == "checkpoint":
        Checkpointer(Path(folder)).save(3, model, optimizer)
        Checkpointer(Path(folder)).load(other, resumed)
    else:
        saved = copy.deepcopy(optimizer.state_dict())
        if way == "file":
            buffer = io.BytesIO()
            torch.save(saved, buffer)
            buffer.seek(0)
            saved = torch.load(buffer, weights_only=True)
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(saved)
    for step in range(3, 8):
        _step(cell, model, optimizer, step)
        _step(cell, other, resumed, step)
    pairs = [*zip(model.parameters(), other.parameters(), strict=True)]
    pairs += [
        (mine, theirs) for (_, mine), (_, theirs) in zip(optimizer.main_params(), resumed.main_params(), strict=True)
    ]
    return [bits_equal(whole(mine), whole(theirs)) for mine, theirs in pairs]


@pytest.mark.default("float16-zero1-parameters-fp32-warming-state dict")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["lookahead", "warming"])
@pytest.mark.parametrize("cell", OWN_CELLS, ids=str)
def test_a_resumed_run_has_the_same_bits(cell: Cell, kind: str, way: str, ranks: RankPool, tmp_path: Path) -> None:
    """Slow weights and the base optimizer's moments; a step count, a schedule, and a dict of pairs."""
    if way == "file" and cell.layout == "fsdp2":
        way = "checkpoint"  # whose state dict has DTensors
    assert all(map(all, ranks.run(cell.world_size, _resume, cell, kind, way, str(tmp_path))))


@pytest.mark.default("float16-replicated-fp32")
@pytest.mark.parametrize("cell", OWN_CELLS[::4], ids=str)
def test_runs_differ_without_it(cell: Cell) -> None:
    """What is saved matters: a run that starts again with main params and weights alone goes elsewhere."""
    for kind in KINDS:
        model, optimizer = _build(cell, kind)
        for step in range(3):
            _step(cell, model, optimizer, step)
        other, fresh = _build(cell, kind)
        other.load_state_dict(model.state_dict())
        _step(cell, model, optimizer, 3)
        _step(cell, other, fresh, 3)
        assert not all(bits_equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_optimizer_alone(kind: str) -> None:
    """And of optimizers that hold optimizers, with a resume by a state dict between."""
    cell = Cell(torch.float32, "replicated")
    alone = Given(SHAPES)
    inner = KINDS[kind](list(alone.named_parameters()))
    model, optimizer = _build(cell, kind)
    for step in range(6):
        alone(integers(SHAPES, step)).backward()
        inner.step()
        inner.zero_grad()
        _step(cell, model, optimizer, step)
        if kind != "both":
            saved = copy.deepcopy(optimizer.state_dict())
            _, resumed = _build(cell, kind)
            resumed.load_state_dict(saved)
            assert _same(resumed.state_dict(), saved)
    assert all(bits_equal(one, two) for one, two in zip(alone.parameters(), model.parameters(), strict=True))


def _same(left: Any, right: Any) -> bool:
    mine, theirs = values_in(left), values_in(right)
    return mine.keys() == theirs.keys() and all(
        bits_equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key]
        for key, value in mine.items()
    )


def _to_other_ranks(folder: str, kind: str) -> list[bool]:
    """Save on two ranks by parameters; load, in this world, on each rank alone."""
    cell, alone = Cell(torch.float16, "zero1-parameters"), Cell(torch.float16, "replicated")
    model, optimizer = _build(cell, kind)
    for step in range(3):
        _step(cell, model, optimizer, step)
    saved = optimizer.state_dict()
    other, resumed = _build(alone, kind)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    assert _same(resumed.state_dict()["optimizer"], saved["optimizer"])
    for step in range(3, 6):
        _step(cell, model, optimizer, step)
        _step(alone, other, resumed, step)
    return [bits_equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True)]


@pytest.mark.parametrize("kind", ["lookahead", "warming"])
def test_sharded_state_loads_replicated(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    """Each rank has the slow weights and moments of its parameters; a state dict has all, by name."""
    for same in ranks.run(2, _to_other_ranks, str(tmp_path), kind):
        assert all(same)


def test_the_state_dict_of_the_optimizer_alone_loads() -> None:
    """What a run without megascale has saved, of fp32 parameters: its own entries lie beside torch's two."""
    alone = Given(SHAPES)
    inner = Warming(list(alone.named_parameters()))
    for step in range(3):
        alone(integers(SHAPES, step)).backward()
        inner.step()
        inner.zero_grad()
    cell = Cell(torch.float32, "replicated")
    model, optimizer = _build(cell, "warming")
    model.load_state_dict(alone.state_dict())
    optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
    for step in range(3, 6):
        alone(integers(SHAPES, step)).backward()
        inner.step()
        inner.zero_grad()
        _step(cell, model, optimizer, step)
    assert all(bits_equal(one, two) for one, two in zip(alone.parameters(), model.parameters(), strict=True))


def test_a_chain_saves_each_of_its_optimizers() -> None:
    """Two optimizers, each with a state dict of its own."""

    def build() -> tuple[list[Given], ChainedOptimizer]:
        models = [Given(SHAPES), Given(SHAPES)]
        parts = [
            MixedPrecisionOptimizer(Warming([(f"{at}.{name}", param) for name, param in model.named_parameters()]))
            for at, model in enumerate(models)
        ]
        return models, ChainedOptimizer(parts)

    def step(models: list[Given], chain: ChainedOptimizer, seed: int) -> None:
        for model in models:
            model(integers(SHAPES, seed)).backward()
        chain.step()
        chain.zero_grad()

    models, chain = build()
    for seed in range(3):
        step(models, chain, seed)
    others, resumed = build()
    resumed.load_state_dict(copy.deepcopy(chain.state_dict()))
    for model, other in zip(models, others, strict=True):
        other.load_state_dict(model.state_dict())
    for seed in range(3, 6):
        step(models, chain, seed)
        step(others, resumed, seed)
    for model, other in zip(models, others, strict=True):
        assert all(bits_equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


# What is refused


class _Base(torch.optim.SGD):
    """SGD with an entry of its own."""

    def __init__(self, params: Any, entry: Any) -> None:
        super().__init__(params, lr=0.1)
        self.entry = entry

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.entry, Exception):
            raise self.entry
        return {**super().state_dict(), "entry": self.entry}


class _Loading(_Base):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["entry"] == "poison":
            self.entry = "half"
            raise KeyError("antidote")
        self.entry = state_dict["entry"]


@pytest.mark.parametrize(
    ("kind", "entry", "words"),
    [
        (_Loading, deque([1]), r"_Loading cannot be saved: _Loading\.state_dict\(\)\['entry'\] is a deque"),
        (_Loading, {"a": [torch.Generator()]}, r"\['entry'\]\['a'\]\[0\] is a Generator"),
        (_Loading, {frozenset([1]): 1}, "frozenset"),
        (_Loading, NotImplementedError("later"), "cannot be saved: later"),
        (
            _Base,
            1,
            r"_Base cannot be loaded: its state_dict\(\) has \['entry'\], which torch's load_state_dict\(\) drops",
        ),
    ],
    ids=["object", "nested", "key", "raises", "not loaded"],
)
def test_what_cannot_be_saved_is_refused_at_construction(kind: Any, entry: Any, words: str) -> None:
    """By name, before anything is wrapped: a run would lose it at its first resume."""
    model = Given(SHAPES)
    with pytest.raises(ArgumentError, match=words):
        MixedPrecisionOptimizer(kind(model.parameters(), entry))
    MixedPrecisionOptimizer(_Loading(model.parameters(), [1, (2, "a"), {(0, "b"): None}]))


def _sharded_tensor() -> str:
    cell = Cell(torch.float16, "zero1-parameters")
    with pytest.raises(ArgumentError) as caught:
        cell.optimizer(cell.model(), lambda named: _Loading(named, torch.ones(2)))
    return str(caught.value)


def test_tensors_of_no_parameter_are_refused_where_ranks_have_their_own(ranks: RankPool) -> None:
    """Sharded by parameters each rank would save another; replicated they are saved."""
    for message in ranks.run(2, _sharded_tensor):
        assert "use MixedPrecisionOptimizer" in message
    inner = _Loading(Given(SHAPES).parameters(), torch.ones(2))
    optimizer = MixedPrecisionOptimizer(inner)
    saved = optimizer.state_dict()
    inner.entry = torch.zeros(2)
    optimizer.load_state_dict(saved)
    assert inner.entry.equal(torch.ones(2))


def test_an_entry_that_is_refused_changes_nothing() -> None:
    """The optimizer's own load_state_dict() raises half-way: a StateDictError, and all is as before."""
    model = Given(SHAPES)
    inner = _Loading(model.named_parameters(), 1)
    optimizer = MixedPrecisionOptimizer(inner)
    _step(Cell(torch.float32, "replicated"), model, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(before)
    other["optimizer"]["shared_state"][0]["state_dict()"]["entry"] = "poison"
    other["optimizer"]["param_groups"][0]["lr"] = 3.0
    with pytest.raises(StateDictError, match=r"_Loading\.load_state_dict\(\) raised KeyError: 'antidote'"):
        optimizer.load_state_dict(other)
    assert _same(optimizer.state_dict(), before)
    assert inner.entry == 1
    del other["optimizer"]["shared_state"]
    with pytest.raises(StateDictError, match="lacks"):
        optimizer.load_state_dict(other)
    optimizer.load_state_dict(other, strict=False)
    assert optimizer.param_groups[0]["lr"] == 3.0


def test_careless_state_stays_an_error_after_a_state_dict() -> None:
    """Reading an own state dict lends main params: that makes nothing of 16-bit state, which a step refuses."""
    cell = Cell(torch.float16, "replicated")
    model, optimizer = _build(cell, "warming")
    _step(cell, model, optimizer, 0)
    weight = next(model.parameters())
    optimizer.optimizer.state[weight]["made"] = torch.zeros_like(weight)
    optimizer.state_dict()
    cell.backward(optimizer, model, integers(SHAPES, 1))
    with pytest.raises(UsageError, match="'made'"):
        optimizer.step()
