"""tests/cells.py: each cell is built and steps, with the gradients that it was given."""

import pytest
import torch

from tests.cells import CELLS, Cell, integers
from tests.fsdp2_cases import whole
from tests.pool import RankPool


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_cell_steps_with_its_gradients(cell: Cell, ranks: RankPool) -> None:
    """The norm is that of the given gradients, in every cell."""
    expected = torch.cat([grad.flatten() for grad in integers(cell.shapes, 1)]).norm().item()
    for success, norm, moved in ranks.run(cell.world_size, _one_step, cell):
        assert success
        assert norm == pytest.approx(expected, rel=1e-5)
        assert moved


def _one_step(cell: Cell) -> tuple[bool, float, bool]:
    model = cell.model()
    before = [whole(weight) for weight in model.parameters()]
    optimizer = cell.optimizer(model)
    cell.backward(optimizer, model, integers(cell.shapes, 1))
    result = optimizer.step()
    moved = any(not whole(weight).equal(old) for weight, old in zip(model.parameters(), before, strict=True))
    return bool(result.success), result.grad_norm.item(), moved
