"""The triton backend's tables of addresses: made once, kept, and made anew where something has changed."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from megascale.errors import UsageError
from megascale.kernels import Operands, ReferenceBackend
from megascale.kernels.remainders import encode
from megascale.kernels.tensors.tensor_list import TensorList
from megascale.kernels.triton import backend as triton_backend
from megascale.kernels.triton import device_table
from megascale.kernels.triton.backend import TritonBackend
from megascale.utils import transfer
from tests.training import bits_equal
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
    make = device_table.make_plan

    def noted(*args: Any, **options: Any) -> device_table.Plan:
        plans.append(make(*args, **options))
        return plans[-1]

    monkeypatch.setattr(triton_backend, "make_plan", noted)
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
    return made


def test_tables_are_made_once(made: list[device_table.Plan], copies: list[Tensor]) -> None:
    """Steps on tensors that stay in place copy nothing; statistics and update of gradients that have moved share one
    copy, of their addresses. Other dtypes, lengths or layouts make a table.
    """
    operands, backend = operands_of(ROWS[1:3]), TritonBackend()
    grads = list(operands.grad)
    for step in range(4):
        if step == 3:
            grads[0] = grads[0].clone()
        operands.grad = TensorList(grads)
        backend.measure(operands.grad, True)
        update(backend, operands, HYPERS["adamw"], decision_of())
        # Tables of the statistics and the update, and the addresses.
        assert (len(made), len(copies)) == (2, 3 + (step == 3))
    assert copies[-1].tolist() == [grad.data_ptr() for grad in operands.grad]
    kept = grads[0]
    backend.measure([kept], True)
    backend.measure([kept.view(torch.bfloat16)], True)
    backend.measure([kept[:5]], True)
    backend.measure([kept[:10:2]], True)
    assert len(made) == 6


def test_parts_of_a_list_have_addresses_once_it_is_measured(
    made: list[device_table.Plan], copies: list[Tensor]
) -> None:
    """Units are updated one after the other, by the addresses that the statistics of all have read."""
    backend, units = TritonBackend(), [operands_of(ROWS[1:3]), operands_of(ROWS[:2])]
    whole = TensorList([*units[0].grad, *units[1].grad])
    parts = whole.cut([slice(0, 2), slice(2, 4)])
    backend.measure(whole, True)
    before = len(copies)
    for unit, grads in zip(units, parts, strict=True):
        unit.grad = grads
        update(backend, unit, HYPERS["adamw"], decision_of())
        assert grads.on_device is not None
        assert grads.on_device.tolist() == grads.addresses.tolist()
    assert len(copies) - before == sum(len(plan.tables) for plan in made[1:])


def _says_what_is_aligned(table: device_table.DeviceTable) -> bool:
    sizes = [(dtype or SINGLE).itemsize for dtype in table.dtypes]
    expected = []
    for row in table.rows.tolist():
        pointers = zip(row[device_table.TENSORS :], sizes, strict=True)
        expected.append(int(all(pointer % (4 * size) == 0 for pointer, size in pointers)))
    return table.rows[:, device_table.ALIGNED].tolist() == expected


def test_tables_do_not_depend_on_where_gradients_lie(made: list[device_table.Plan]) -> None:
    """Also where they are aligned otherwise: the table is the very same, and says what is aligned of the rest."""
    operands, backend = operands_of(), TritonBackend()
    operands.state["exp_avg"][2] = torch.zeros(2, device=DEVICE)[1:]
    for offset in (0, 1, 8):
        operands.grad = [
            torch.zeros(len(grad) + offset, dtype=grad.dtype, device=DEVICE)[offset:] for grad in operands.grad
        ]
        update(backend, operands, HYPERS["adamw"], decision_of())
    assert len(made) == 1
    assert len(made[0].tables) > 2
    assert all(map(_says_what_is_aligned, made[0].tables))


def test_tables_are_made_anew_where_more_than_places_changed(made: list[device_table.Plan]) -> None:
    """For gradients of another dtype or layout; those of the newest few are kept, and no more."""
    operands, backend = operands_of([(48, SINGLE, HALF, SINGLE), (17, SINGLE, HALF, SINGLE)]), TritonBackend()
    grad, other = operands.grad
    for changed in (grad, grad.to(HALF), torch.zeros(96, device=DEVICE)[::2], grad):
        operands.grad = [changed, other]
        update(backend, operands, HYPERS["adamw"], decision_of())
        backend.measure(operands.grad, False)
    assert len(made) == 6
    for count in range(1, 20):
        backend.measure([torch.ones(count, device=DEVICE)], False)
    assert len(backend._measured) == device_table.PLANS


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
    """Under graph capture what was made before is taken, and held for the graph; tensors that have moved are a
    UsageError, gradients too.
    """
    operands, backend = operands_of(ROWS[1:3]), TritonBackend()

    def step(grads: list[Tensor]) -> TensorList:
        operands.grad = measured = TensorList(grads)
        backend.measure(measured, True)
        update(backend, operands, HYPERS["adamw"], decision_of())
        return measured

    grads = list(operands.grad)
    step(grads)
    for module in (device_table, triton_backend):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    transfer.held_for_graph()
    measured = step(grads)
    held = transfer.held_for_graph()
    assert [one for one in held if isinstance(one, device_table.Plan)] == [
        *backend._measured.values(),
        *operands.tables.values(),
    ]
    assert sum(one is measured.on_device for one in held) == 2
    assert transfer.held_for_graph() == []
    refusal = r"run one step before capture.*zero_grad\(set_to_none=False\)"
    for moved in ([grad.clone() for grad in grads], grads[:1]):
        with pytest.raises(UsageError, match=refusal):
            step(moved)


def test_capture_holds_remainders_beside_gradients_of_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GradSync's gradients lie in row-major order, channels_last weights do not: what the reference updates for that
    in a graph has no table from the steps before, and needs none. A StepGraph could not be captured.
    """
    generator = torch.Generator().manual_seed(0)
    main, values = (torch.randn(2, 3, 4, 5, generator=generator).to(DEVICE) for _ in range(2))

    def operands() -> Operands:
        model, remainder = (one.contiguous(memory_format=torch.channels_last) for one in encode(main, HALF))
        state = {name: [torch.zeros_like(model, dtype=SINGLE)] for name in ("exp_avg", "exp_avg_sq")}
        hollow = torch.empty_like(model, dtype=SINGLE)
        hollow.untyped_storage().resize_(0)
        return Operands(
            model=[model],
            main=[hollow],
            grad=[values],
            state=state,
            step=[torch.zeros((), device=DEVICE)],
            remainder=[remainder],
        )

    ours, theirs, backend, reference = operands(), operands(), TritonBackend(), ReferenceBackend()
    for is_captured in (False, True):
        for module in (device_table, triton_backend):
            monkeypatch.setattr(module, "is_capturing", lambda device, captured=is_captured: captured)
        update(backend, ours, HYPERS["adamw"], decision_of())
        update(reference, theirs, HYPERS["adamw"], decision_of())
        for left, right in zip([*ours.model, *ours.remainder], [*theirs.model, *theirs.remainder], strict=True):
            assert bits_equal(left, right)
