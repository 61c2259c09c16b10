"""Rows that lie side by side become one row; nothing else does."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from megascale.kernels import Operands
from megascale.kernels.blocks import Row
from megascale.kernels.prepared_rows import PreparedRows
from megascale.kernels.runs import runs_of


def _flat_rows(sizes: list[int], dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16)) -> list[Row]:
    columns = [torch.arange(sum(sizes)).to(dtype).split(sizes) for dtype in dtypes]
    return [list(row) for row in zip(*columns, strict=True)]


def _members(rows: list[Row], keys: list[int] | None = None) -> list[list[int]]:
    return [run.members for run in runs_of(rows, keys or [0] * len(rows))]


def test_neighbours_merge_in_memory_order() -> None:
    """A flat buffer is one run, whatever the order of its rows; a write through the run reaches every row."""
    rows = _flat_rows([3, 1, 5, 2])
    order = [2, 0, 3, 1]
    [run] = runs_of([rows[index] for index in order], [0] * 4)
    assert [order[member] for member in run.members] == [0, 1, 2, 3]
    assert [len(tensor) for tensor in run.row] == [11, 11]
    assert torch.equal(run.row[1], torch.arange(11).half())
    run.row[0].add_(100)
    assert torch.equal(torch.cat([row[0] for row in rows]), torch.arange(11.0) + 100)


def test_every_element_is_in_one_run() -> None:
    """Rows cut at random from several buffers, with gaps and in random order: each element is in a run once."""
    shuffled = random.Random(0)
    for _ in range(50):
        rows, keys = [], []
        for _ in range(3):
            made = _flat_rows([shuffled.randrange(4) for _ in range(8)])
            kept = [row for row in made if shuffled.random() < 0.8]
            rows += kept
            keys += [shuffled.randrange(2) for _ in kept]
        order = shuffled.sample(range(len(rows)), len(rows))
        rows, keys = [rows[index] for index in order], [keys[index] for index in order]
        runs = runs_of(rows, keys)
        assert sorted(index for run in runs for index in run.members) == [
            i for i, row in enumerate(rows) if len(row[0])
        ]
        for run in runs:
            assert len({keys[index] for index in run.members}) == 1
            for place, tensor in enumerate(run.row):
                assert torch.equal(tensor, torch.cat([rows[index][place] for index in run.members]))


def test_a_gap_in_any_tensor_separates() -> None:
    """One tensor that lies elsewhere is enough: all of a row's tensors have to be neighbours."""
    rows = _flat_rows([4, 4, 4])
    rows[1][1] = rows[1][1].clone()
    assert sorted(_members(rows)) == [[0], [1], [2]]
    rows = _flat_rows([4, 1, 4])
    assert _members([rows[0], rows[2]]) == [[0], [1]]


def test_different_keys_separate() -> None:
    """Rows with unlike step counts share no bias correction, and no run."""
    assert _members(_flat_rows([2, 2, 2, 2]), [7, 7, 8, 8]) == [[0, 1], [2, 3]]


def test_different_dtypes_separate() -> None:
    """Bytes that follow one another are no row of one dtype."""
    memory = torch.zeros(32, dtype=torch.uint8)
    rows = [[memory[:16].view(torch.float32)], [memory[16:].view(torch.float16)]]
    assert _members(rows) == [[0], [1]]


def test_neighbours_in_different_storages_separate() -> None:
    """Allocators put one block right after another: a view may not reach from one into the next."""
    memory = torch.zeros(64, dtype=torch.uint8)
    first, second = (
        torch.frombuffer(memory.numpy()[part], dtype=torch.float32) for part in (slice(32), slice(32, None))
    )
    assert first.data_ptr() + 32 == second.data_ptr()
    assert _members([[first], [second]]) == [[0], [1]]


def test_empty_rows_are_in_no_run() -> None:
    """Nothing is called for an empty row, and it separates no neighbours."""
    assert _members(_flat_rows([0, 3, 0, 2, 0])) == [[1, 3]]
    assert _members(_flat_rows([0])) == []


def _operands(main: list[Tensor], grad: list[Tensor]) -> Operands:
    return Operands(model=[tensor.half() for tensor in main], main=main, grad=grad, state={})


def test_prepared_rows_follow_the_gradients() -> None:
    """Main params are merged once; from step to step gradients and keys decide whether the run holds."""
    rows = _flat_rows([3, 4, 5], (torch.float32, torch.float16, torch.float16))
    operands = Operands(model=[row[1] for row in rows], main=[row[0] for row in rows], grad=[row[2] for row in rows])
    prepared = PreparedRows(operands, ())

    def members(grads: Sequence[Tensor], keys: list[int]) -> list[list[int]]:
        runs = prepared.runs(prepared.flat_grads(grads), keys)
        assert all(len({len(tensor) for tensor in run.row}) == 1 for run in runs)
        return [run.members for run in runs]

    assert members(operands.grad, [0, 0, 0]) == [[0, 1, 2]]
    assert members([operands.grad[0], operands.grad[1], operands.grad[2].clone()], [0, 0, 0]) == [[0, 1], [2]]
    assert members(operands.grad, [0, 1, 1]) == [[0], [1, 2]]
    assert members([operands.grad[0].double(), *operands.grad[1:]], [0, 0, 0]) == [[1, 2]]
    assert members(operands.grad, [0, 0, 0]) == [[0, 1, 2]]


def test_prepared_rows_leave_out_what_has_no_common_layout() -> None:
    """fp64, sliced tensors and gradients of other strides are for another path; equal dense strides are served."""
    dense, sliced = torch.zeros(4, 6), torch.zeros(4, 9)[:, ::3]
    mains = [dense, dense.clone().t(), sliced, dense.double(), torch.zeros(())]
    prepared = PreparedRows(_operands(mains, mains), ())
    assert [row is not None for row in prepared.rows] == [True, True, False, False, True]
    same = prepared.flat_grads([torch.zeros_like(main) for main in mains])
    assert [grad is not None for grad in same] == [True, True, False, False, True]
    other = prepared.flat_grads([torch.zeros(6, 4).t(), torch.zeros(6, 4), *mains[2:]])
    assert [grad is not None for grad in other] == [False, False, False, False, True]
