"""Parameters without a gradient: they are left alone, and a step does not make its tables anew for the others."""

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale import MixedPrecisionOptimizer
from megascale.errors import MegascaleError
from megascale.kernels import Operands
from megascale.main_params.update_unit import UpdateUnit
from megascale.utils.dtensors import to_local
from tests.cells import CELLS, Cell, integers
from tests.pool import RankPool

SOME_CELLS = [cell for cell in CELLS if cell.dtype == torch.float16 or str(cell) == "float32-fsdp2-compact"]
WITHOUT_MAIN_GRADS = [cell for cell in SOME_CELLS if cell.layout != "zero1"]
"""ZeRO-1 has a main grad for each parameter, of zeros where none was used: only a frozen parameter has none."""

SHAPES = [(64,)] * 160
FEW = 40
"""Of these, in what a step with many is compared with."""


@pytest.mark.slow
@pytest.mark.parametrize("cell", SOME_CELLS, ids=str)
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
def test_nothing_is_kept_for_missing_gradients(cell: Cell, ranks: RankPool) -> None:
    """One table serves whichever are missing. It goes with the parameters' unit: an added group makes another one."""
    for units, operands, after_adding in ranks.run(cell.world_size, _kept, cell):
        assert units == 1
        assert operands <= 2  # fp32 parameters beside those held as remainders
        assert after_adding == 1


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


@pytest.mark.parametrize("cell", WITHOUT_MAIN_GRADS, ids=str)
def test_state_of_a_parameter_without_a_gradient_is_taken_in(cell: Cell, ranks: RankPool) -> None:
    """State that a program removed is zeros from the next step on; what does not fit is refused by it, with or without
    a gradient.
    """
    for removed, message, last in ranks.run(cell.world_size, _removed, cell):
        assert (removed, last) == (True, True)
        assert "exp_avg" in message
        assert "weights.1" in message


def _removed(cell: Cell) -> tuple[bool, str, bool]:
    model = cell.model(SHAPES[:3])
    optimizer = cell.optimizer(model)
    weights, state = list(model.parameters()), optimizer._inner.state

    def step(missing: list[int]) -> bool:
        grads = [None if index in missing else grad for index, grad in enumerate(integers(SHAPES[:3], 1))]
        optimizer.zero_grad()
        cell.backward(optimizer, model, grads)
        return bool(optimizer.step().success)

    step([])
    del state[weights[0]]
    removed = step([0, 1]) and not any(to_local(value).any() for value in state[weights[0]].values())
    state[weights[1]]["exp_avg"] = torch.zeros(3)
    with pytest.raises(MegascaleError) as refused:
        step([0, 1])
    del state[weights[1]]
    last = step([]) and [float(state[weight]["step"]) for weight in weights] == [1.0, 1.0, 3.0]
    return removed, str(refused.value), last
