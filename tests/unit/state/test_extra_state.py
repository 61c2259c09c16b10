"""What an optimizer's own state_dict() has beside `state` and `param_groups` is saved and loaded, bit by bit.

The cells: fp16 in each layout, by elements for those that the caller says are elementwise, and fp32, which has no main
params. An optimizer that runs its own step() has no 8-bit moments.
"""

import copy
import io
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import ChainedOptimizer, MixedPrecisionOptimizer
from megascale.checkpoint import Checkpointer
from megascale.errors import ArgumentError, StateDictError
from tests.cells import SHAPES, Cell, Given, integers
from tests.fsdp2_cases import whole
from tests.own_methods import Warming
from tests.pool import RankPool
from tests.training import bits_equal, same_values

OWN_CELLS = [
    *(Cell(torch.float16, layout) for layout in ("replicated", "zero1", "zero1-parameters", "fsdp2")),
    Cell(torch.float32, "replicated"),
]
"""A parameter's dtype matters for what is a main param alone."""
WAYS = ("state dict", "file", "checkpoint")


def _step(cell: Cell, model: nn.Module, optimizer: Any, step: int) -> None:
    cell.backward(optimizer, model, integers(cell.shapes, step))
    assert optimizer.step().success
    optimizer.zero_grad()


def _build(cell: Cell) -> tuple[Any, Any]:
    model = cell.model()
    options: dict[str, Any] = {"shard": "elements", "elementwise": True} if cell.layout == "zero1" else {}
    return model, cell.optimizer(model, Warming, **options)


def _resume(cell: Cell, way: str, folder: str) -> list[bool]:
    """Return, per weight and main param, whether a run that was resumed has the bits of one that was not."""
    model, optimizer = _build(cell)
    for step in range(3):
        _step(cell, model, optimizer, step)
    other, resumed = _build(cell)
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


@pytest.mark.default("float16-zero1-parameters-fp32-state dict")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cell", OWN_CELLS, ids=str)
def test_a_resumed_run_has_the_same_bits(cell: Cell, way: str, ranks: RankPool, tmp_path: Path) -> None:
    """A step count, a schedule, and a dict."""
    if way == "file" and cell.layout == "fsdp2":
        way = "checkpoint"  # whose state dict has DTensors
    assert all(map(all, ranks.run(cell.world_size, _resume, cell, way, str(tmp_path))))


def test_the_bits_are_those_of_the_optimizer_alone() -> None:
    """With a resume by a state dict between."""
    cell = Cell(torch.float32, "replicated")
    alone = Given(SHAPES)
    inner = Warming(list(alone.named_parameters()))
    model, optimizer = _build(cell)
    for step in range(6):
        alone(integers(SHAPES, step)).backward()
        inner.step()
        inner.zero_grad()
        _step(cell, model, optimizer, step)
        saved = copy.deepcopy(optimizer.state_dict())
        _, resumed = _build(cell)
        resumed.load_state_dict(saved)
        assert same_values(resumed.state_dict(), saved)
    assert all(bits_equal(one, two) for one, two in zip(alone.parameters(), model.parameters(), strict=True))


def _to_other_ranks(folder: str) -> list[bool]:
    """Save on two ranks by parameters; load, in this world, on each rank alone."""
    cell, alone = Cell(torch.float16, "zero1-parameters"), Cell(torch.float16, "replicated")
    model, optimizer = _build(cell)
    for step in range(3):
        _step(cell, model, optimizer, step)
    saved = optimizer.state_dict()
    other, resumed = _build(alone)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved)
    assert same_values(resumed.state_dict()["optimizer"], saved["optimizer"])
    for step in range(3, 6):
        _step(cell, model, optimizer, step)
        _step(alone, other, resumed, step)
    return [bits_equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True)]


def test_sharded_state_loads_replicated(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank has the moments of its parameters; a state dict has all, by name."""
    for same in ranks.run(2, _to_other_ranks, str(tmp_path)):
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
    model, optimizer = _build(cell)
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
        (_Loading, {(0, "b"): 1}, r"\['entry'\] has the key \(0, 'b'\), .* keys that are strings or numbers"),
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
    MixedPrecisionOptimizer(_Loading(model.parameters(), [1, (2, "a"), {0: None}]))


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
    assert same_values(optimizer.state_dict(), before)
    assert inner.entry == 1
