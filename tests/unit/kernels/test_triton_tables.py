"""The triton backend's tables of addresses: made once, kept, and made anew where something has changed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from megascale.errors import UsageError
from megascale.kernels import Operands, ReferenceBackend
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.kernels.triton import device_table, grad_addresses
from megascale.kernels.triton.backend import TritonBackend
from tests.unit.kernels.triton_cases import (
    DEVICE,
    HALF,
    HYPERS,
    ROWS,
    SINGLE,
    decision_of,
    operands_of,
    same_operands,
    set_grads,
    update,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[device_table.Plan]:
    """Note plans that are made anew, of all that they are made from."""
    plans: list[device_table.Plan] = []
    make = device_table._make_plan

    def noted(*args: Any) -> device_table.Plan:
        plans.append(make(*args))
        return plans[-1]

    monkeypatch.setattr(device_table, "_make_plan", noted)
    return plans


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Note what is copied to the device, of tables and of addresses."""
    made: list[Tensor] = []
    copied = device_table.copied

    def noted(*args: Any) -> Tensor:
        made.append(copied(*args))
        return made[-1]

    monkeypatch.setattr(device_table, "copied", noted)
    monkeypatch.setattr(grad_addresses, "copied", noted)
    return made


def test_tables_are_made_once(made: list[device_table.Plan], copies: list[Tensor]) -> None:
    """Steps on tensors that stay in place copy nothing; statistics and update of gradients that have moved share one
    copy, of their addresses. Other dtypes, lengths or layouts make a table.
    """
    operands, backend = operands_of(ROWS[1:3]), TritonBackend()
    for step in range(3):
        set_grads(operands, seed=step)
        backend.measure(operands.grad, True)
        update(backend, operands, HYPERS["adamw"], decision_of())
    assert (len(made), len(copies)) == (2, 3)  # tables of the statistics and the update, and the addresses
    kept, *others = operands.grad
    operands.grad = [kept.clone(), *others]
    backend.measure(operands.grad, True)
    update(backend, operands, HYPERS["adamw"], decision_of())
    assert (len(made), len(copies)) == (2, 4)
    assert copies[-1].tolist() == [grad.data_ptr() for grad in operands.grad]
    operands.grad = [kept, *others]
    update(backend, operands, HYPERS["adamw"], decision_of())
    assert (len(made), len(copies)) == (2, 4)
    backend.measure([kept], True)
    backend.measure([kept.view(torch.bfloat16)], True)
    backend.measure([kept[:5]], True)
    backend.measure([kept[:10:2]], True)
    assert len(made) == 6


def _find(cache: device_table.PlanCache, operands: Operands) -> device_table.Plan:
    columns = [TensorList(tensors) for tensors in (operands.main, operands.model, operands.state["exp_avg"])]
    beside = {device_table.STEP: TensorList(operands.step)}
    return cache.find(columns, beside, TensorList(operands.grad))


def _same_plans(left: device_table.Plan, right: device_table.Plan) -> bool:
    pairs = zip(left.tables, right.tables, strict=True)
    return left.rest == right.rest and all(
        (a.dtypes, a.grad_dtype, a.longest) == (b.dtypes, b.grad_dtype, b.longest)
        and torch.equal(a.rows, b.rows)
        and torch.equal(a.chunk_rows, b.chunk_rows)
        for a, b in pairs
    )


def _says_what_is_aligned(table: device_table.DeviceTable) -> bool:
    sizes = [(dtype or SINGLE).itemsize for dtype in table.dtypes]
    expected = []
    for row in table.rows.tolist():
        pointers = zip(row[device_table.TENSORS :], sizes, strict=True)
        expected.append(int(all(pointer % (4 * size) == 0 for pointer, size in pointers)))
    return table.rows[:, device_table.ALIGNED].tolist() == expected


def test_tables_do_not_depend_on_where_gradients_lie(made: list[device_table.Plan]) -> None:
    """Also where they are aligned otherwise: the table is the very same, and says what is aligned of the rest."""
    operands, cache = operands_of(), device_table.PlanCache()
    operands.state["exp_avg"][2] = torch.zeros(2, device=DEVICE)[1:]
    plan = _find(cache, operands)
    assert len(plan.tables) > 2
    assert all(map(_says_what_is_aligned, plan.tables))
    for offset in (0, 1, 8):
        operands.grad = [
            torch.zeros(len(grad) + offset, dtype=grad.dtype, device=DEVICE)[offset:] for grad in operands.grad
        ]
        assert _find(cache, operands) is plan
    assert len(made) == 1


@pytest.mark.parametrize("change", ["dtype", "length", "layout", "state"])
def test_tables_are_made_anew_where_more_than_places_changed(made: list[device_table.Plan], change: str) -> None:
    """A gradient of another dtype, length or layout; another tensor elsewhere."""
    operands, cache = operands_of([(48, SINGLE, HALF, SINGLE), (17, SINGLE, HALF, SINGLE)]), device_table.PlanCache()
    _find(cache, operands)
    grad, other = operands.grad
    if change == "state":
        operands.state["exp_avg"][0] = operands.state["exp_avg"][0].clone()
    else:
        changed = {"dtype": grad.to(HALF), "length": grad[:40], "layout": torch.zeros(96, device=DEVICE)[::2]}
        operands.grad = [changed[change], other]
    plan = _find(cache, operands)
    assert len(made) == 2
    assert _same_plans(plan, _find(device_table.PlanCache(), operands))


def test_what_is_kept_of_tables_is_dropped_with_them(
    monkeypatch: pytest.MonkeyPatch, made: list[device_table.Plan]
) -> None:
    """Calls with ever other tensors keep what they may on the device, and no more; the latest ones stay known."""
    monkeypatch.setattr(device_table, "CACHE_BYTES", 0)
    monkeypatch.setattr(grad_addresses, "CACHE_BYTES", 0)
    backend = TritonBackend()
    for count in range(1, 6):
        grads = [torch.ones(count, device=DEVICE) for _ in range(count)]
        for _ in range(2):
            backend.measure(grads, False)
    assert len(made) == 5
    plans, columns = backend._plans, backend._addresses
    assert len(plans._plans) == len(columns._columns) == 2
    assert plans._nbytes == sum(table.nbytes for plan in plans._plans.values() for table in plan.tables)
    assert columns._nbytes == sum(column.nbytes for column in columns._columns.values())


def test_moved_gradients_have_the_bits_of_the_reference() -> None:
    """Updates and statistics of gradients that lie elsewhere, and are aligned otherwise, in each step."""
    backend, reference = TritonBackend(), ReferenceBackend()
    ours, theirs = operands_of(), operands_of()
    for step in range(3):
        ours.grad = [torch.zeros(len(grad) + step, dtype=grad.dtype, device=DEVICE)[step:] for grad in ours.grad]
        set_grads(ours, seed=step)
        set_grads(theirs, seed=step)
        assert backend.measure(ours.grad, True).zeros is not None
        update(backend, ours, HYPERS["adamw"], decision_of())
        update(reference, theirs, HYPERS["adamw"], decision_of())
    assert same_operands(ours, theirs)


def test_capture_reuses_tables_and_refuses_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under graph capture what was made before is taken and kept for good; tensors that have moved are a UsageError,
    gradients too.
    """
    monkeypatch.setattr(device_table, "CACHE_BYTES", 0)
    monkeypatch.setattr(grad_addresses, "CACHE_BYTES", 0)
    operands, backend = operands_of(ROWS[1:3]), TritonBackend()

    def found(grads: Sequence[Tensor]) -> tuple[device_table.Plan, Tensor]:
        column = TensorList(grads)
        return backend._plans.find([], grads=column), backend._addresses.find(column)

    def capture(captures: bool) -> None:
        for module in (device_table, grad_addresses):
            monkeypatch.setattr(module, "is_capturing", lambda device: captures)

    backend.measure(operands.grad, True)
    plan, addresses = found(operands.grad)
    capture(True)
    assert found(operands.grad) == (plan, addresses)
    refusal = r"run one step before capture.*zero_grad\(set_to_none=False\)"
    with pytest.raises(UsageError, match=refusal):
        backend.measure([grad.clone() for grad in operands.grad], True)
    with pytest.raises(UsageError, match=refusal):
        backend.measure(operands.grad[:1], True)
    capture(False)
    moved = [[grad.clone() for grad in operands.grad] for _ in range(5)]
    for grads in moved:
        backend.measure([grad[: 1 + len(moved)] for grad in grads], True)
        backend.measure(grads, True)
    assert found(operands.grad)[0] is plan
    assert found(operands.grad)[1] is addresses
    assert len(backend._addresses._columns) == 2
