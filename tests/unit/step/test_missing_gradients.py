"""Parameters without a gradient: they are left alone, and a step does not make its tables anew for the others."""

import gc
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale import MixedPrecisionOptimizer
from megascale.errors import MegascaleError
from megascale.kernels import Operands
from megascale.main_params.update_unit import MOST_PARTS, UpdateUnit
from tests.cells import CELLS, Cell, integers
from tests.fsdp2_cases import whole
from tests.pool import RankPool

WITHOUT_MAIN_GRADS = [cell for cell in CELLS if cell.layout != "zero1"]
"""ZeRO-1 has a main grad for each parameter, of zeros where none was used: only a frozen parameter has none."""

SHAPES = [(64,)] * 160
FEW = 40
"""Of these, in what a step with many is compared with."""


def _left_out(step: int, count: int) -> set[int]:
    """Return which of some parameters have no gradient in a step: some in most, all but one in one of them."""
    if step == 5:
        return set(range(1, count))
    return {index for index in range(count) if random.Random(97 * step + index).random() < 0.4}


@pytest.mark.default("float32-fsdp2-fp32")
@pytest.mark.parametrize("cell", WITHOUT_MAIN_GRADS, ids=str)
def test_each_parameter_trains_as_if_it_were_alone(cell: Cell, ranks: RankPool) -> None:
    """Bits of a parameter and of its state are those of an optimizer that has it alone and steps where it has a
    gradient, whichever others have none. In ZeRO-1 cells no gradient is missing.
    """
    for together, alone in ranks.run(cell.world_size, _together_and_alone, cell):
        assert together.keys() == alone.keys()
        assert [key for key in together if not torch.equal(together[key], alone[key])] == []


def _together_and_alone(cell: Cell) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    shapes = cell.shapes
    model = cell.model()
    optimizer = cell.optimizer(model)
    models = [_alone(cell, model, index) for index in range(len(shapes))]
    optimizers = [cell.optimizer(one) for one in models]
    for step in range(14):
        out = _left_out(step, len(shapes))
        grads = [None if index in out else grad for index, grad in enumerate(integers(shapes, step))]
        optimizer.zero_grad()
        if len(out) < len(shapes):
            cell.backward(optimizer, model, grads)
            optimizer.step()
        for index, grad in enumerate(grads):
            if grad is not None:
                optimizers[index].zero_grad()
                cell.backward(optimizers[index], models[index], [grad])
                optimizers[index].step()
    return _bits(optimizer), {
        key.replace(".0.", f".{index}."): value
        for index, one in enumerate(optimizers)
        for key, value in _bits(one).items()
    }


def _alone(cell: Cell, model: nn.Module, index: int) -> nn.Module:
    """Return a model that has one of the parameters."""
    made = cell.model([cell.shapes[index]])
    [weight], theirs = list(made.parameters()), list(model.parameters())[index]
    with torch.no_grad():
        weight.copy_(theirs)
    return made


def _bits(optimizer: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    """Return main params and state by ``kind.index.name``, whole."""
    found = {}
    for index, (_, main) in enumerate(optimizer.main_params()):
        found[f"main.{index}."] = whole(main)
    for index, state in enumerate(optimizer.optimizer.state.values()):
        found |= {f"state.{index}.{key}": whole(value) for key, value in state.items() if isinstance(value, Tensor)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_step_does_no_more_without_some_gradients(cell: Cell, ranks: RankPool) -> None:
    """A gradient that is missing, the same one or another one in each step, cost 18 to 33 times the host's time, as
    state was checked and tables were made anew: some 160 calls of Python functions per parameter. Likewise the second
    half of a step whose halves are taken apart. In ZeRO-1 cells the same parameter is frozen; to freeze
    another one changes what is trained.
    """
    for few, many in ranks.run(cell.world_size, _calls, cell):
        for kind, calls in many.items():
            per_param = (calls - few[kind]) / (len(SHAPES) - FEW)
            of_all = (many[kind[0], "all there"] - few[kind[0], "all there"]) / (len(SHAPES) - FEW)
            assert per_param <= of_all + 1.5, (kind, per_param, of_all)


def _calls(cell: Cell) -> list[dict[tuple[str, str], int]]:
    return [_calls_of(cell, SHAPES[:FEW]), _calls_of(cell, SHAPES)]


def _calls_of(cell: Cell, shapes: Sequence[tuple[int, ...]]) -> dict[tuple[str, str], int]:
    """Return how many Python functions a third step of its kind calls, by how it is taken and by what is missing."""
    model = cell.model(shapes)
    optimizer = cell.optimizer(model)
    weights = list(model.parameters())
    found = {}
    for taken, take in (("whole", MixedPrecisionOptimizer.step), ("in halves", _take_halves)):
        for missing in ("all there", "the same", "another"):
            if cell.layout == "zero1" and missing == "another":
                continue
            if cell.layout == "zero1":
                weights[5].requires_grad_(missing == "all there")
            for step in range(4):
                grads: list[Tensor | None] = list(integers(shapes, 1))
                if missing != "all there":
                    grads[5 if missing == "the same" else step] = None
                optimizer.zero_grad()
                cell.backward(optimizer, model, grads)
                found[taken, missing] = _count(take, optimizer)
    return found


def _take_halves(optimizer: MixedPrecisionOptimizer) -> None:
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()


def _count(call: Callable[[Any], object], argument: object) -> int:
    calls = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        call(argument)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.default("float32-fsdp2-compact")
@pytest.mark.parametrize("cell", WITHOUT_MAIN_GRADS, ids=str)
def test_what_is_kept_for_missing_gradients_is_bounded(cell: Cell, ranks: RankPool) -> None:
    """Plans are kept for the newest sets alone, and go with the parameters' unit, as when a group is added."""
    for units, operands, after_adding in ranks.run(cell.world_size, _kept, cell):
        assert units <= MOST_PARTS + 1
        assert operands <= 2 * (MOST_PARTS + 1)  # fp32 parameters beside those held as remainders
        assert after_adding == 2


def _kept(cell: Cell) -> tuple[int, int, int]:
    def alive(kind: type) -> set[int]:
        gc.collect()
        return {id(one) for one in gc.get_objects() if isinstance(one, kind)}

    shapes = [(64,)] * 24
    before = [alive(kind) for kind in (UpdateUnit, Operands)]
    model = cell.model(shapes)
    optimizer = cell.optimizer(model)
    for step in range(40):
        grads: list[Tensor | None] = list(integers(shapes, step))
        grads[step % 24] = grads[(7 * step + 1) % 24] = None
        optimizer.zero_grad()
        cell.backward(optimizer, model, grads)
        optimizer.step()
    units, operands = (len(alive(kind) - seen) for kind, seen in zip((UpdateUnit, Operands), before, strict=True))
    more = cell.model([(64,)])
    optimizer.add_param_group({"params": list(more.parameters()), "param_names": ["more"]})
    optimizer.zero_grad()
    cell.backward(optimizer, model, integers(shapes, 1))
    cell.backward(optimizer, more, integers([(64,)], 1))
    optimizer.step()
    return units, operands, len(alive(UpdateUnit) - before[0])


@pytest.mark.default("float32-replicated-compact")
@pytest.mark.parametrize("cell", WITHOUT_MAIN_GRADS, ids=str)
def test_parameters_change_while_gradients_are_missing(cell: Cell, ranks: RankPool) -> None:
    """Values written, a weight moved, a parameter frozen and unfrozen, a group added, state cleared: the bits of a run
    that makes its units, and so its tables, anew in each step.
    """
    for kept, anew in ranks.run(cell.world_size, _changed, cell):
        assert kept.keys() == anew.keys()
        assert [key for key in kept if not torch.equal(kept[key], anew[key])] == []


def _changed(cell: Cell) -> list[dict[str, Tensor]]:
    found = []
    for makes_anew in (False, True):
        model, more = cell.model(SHAPES[:6]), cell.model(SHAPES[:1])
        optimizer = cell.optimizer(model)
        weights = list(model.parameters())
        for step in range(20):
            if step == 4:
                with torch.no_grad():
                    weights[0].mul_(0.5)
            elif step == 6 and cell.layout != "fsdp2":  # which moves its parameters itself
                weights[1].data = weights[1].data.clone()
            elif step in (8, 11):
                weights[2].requires_grad_(step == 11)
            elif step == 13:
                optimizer.add_param_group({"params": list(more.parameters()), "param_names": ["more"]})
            elif step == 16:
                optimizer.optimizer.state[weights[3]].clear()
            if makes_anew:
                optimizer._member.main_params._units = None
            out = _left_out(step % 5, 6) | ({2} if 8 <= step < 11 else set())
            optimizer.zero_grad()
            cell.backward(
                optimizer, model, [None if at in out else g for at, g in enumerate(integers(SHAPES[:6], step))]
            )
            if step >= 13:
                cell.backward(optimizer, more, integers(SHAPES[:1], step))
            assert optimizer.step().success
        found.append(_bits(optimizer))
    return found


@pytest.mark.parametrize("cell", WITHOUT_MAIN_GRADS, ids=str)
def test_state_of_a_parameter_without_a_gradient_is_its_own(cell: Cell, ranks: RankPool) -> None:
    """State that a program removed, or that no kernel can use, is made or refused when a gradient comes, not before."""
    for first, removed, message, last in ranks.run(cell.world_size, _removed, cell):
        assert (first, removed, last) == (True, True, True)
        assert "exp_avg" in message
        assert "weights.1" in message


def _removed(cell: Cell) -> tuple[bool, bool, str, bool]:
    model = cell.model(SHAPES[:3])
    optimizer = cell.optimizer(model)
    weights, state = list(model.parameters()), optimizer.optimizer.state

    def step(missing: list[int]) -> bool:
        grads = [None if index in missing else grad for index, grad in enumerate(integers(SHAPES[:3], 1))]
        optimizer.zero_grad()
        cell.backward(optimizer, model, grads)
        return bool(optimizer.step().success)

    step([])
    del state[weights[0]]
    state[weights[1]]["exp_avg"] = torch.zeros(3)
    first = step([0, 1]) and step([0, 1])
    removed = weights[0] not in state and state[weights[1]]["exp_avg"].shape == (3,)
    with pytest.raises(MegascaleError) as refused:
        step([0])
    del state[weights[1]]
    return first, removed, str(refused.value), step([]) and "exp_avg" in state[weights[0]]
