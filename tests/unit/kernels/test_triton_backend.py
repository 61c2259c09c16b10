"""The triton backend against the reference, bit for bit; in Triton's interpreter where there is no accelerator."""

import copy
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from megascale.errors import ArgumentError, UsageError
from megascale.kernels import AdamHyper, Decision, LionHyper, Operands, ReferenceBackend, Room, SgdHyper, TensorList
from megascale.kernels.tensors import tensor_list, tensor_reader
from megascale.kernels.triton import device_table, grad_addresses
from megascale.kernels.triton.backend import TritonBackend
from tests.cases import cases
from tests.counting import OperatorCounter
from tests.training import bits_equal

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
CHUNK = 64

Hyper = AdamHyper | SgdHyper | LionHyper

HYPERS: dict[str, Hyper] = {
    "adamw": AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, False),
    "adam_l2_amsgrad": AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, False, True, False),
    "adam_maximize": AdamHyper(1e-2, 0.0, 0.95, 1e-6, 0.0, False, False, True),
    "adamw_lr_tensor": AdamHyper(torch.tensor(1e-2, device=DEVICE), 0.9, 0.999, 1e-8, 0.1, True, False, False),
    "sgd": SgdHyper(1e-2, 0.0, 0.0, 0.0, False, False),
    "sgd_nesterov": SgdHyper(1e-2, 0.9, 0.0, 0.1, True, False),
    "sgd_dampening_maximize": SgdHyper(1e-2, 0.9, 0.3, 0.0, False, True),
    "lion": LionHyper(1e-3, 0.9, 0.99, 0.1, False),
    "lion_maximize_lr_tensor": LionHyper(torch.tensor(1e-3, device=DEVICE), 0.95, 0.98, 0.0, True),
}

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
# Of one row: elements, dtypes of gradient, model (None: the main param itself) and state.
Row = tuple[int, torch.dtype, torch.dtype | None, torch.dtype]
ROWS: list[Row] = [
    (0, HALF, HALF, SINGLE),
    (3 * CHUNK + 5, HALF, HALF, SINGLE),
    (1, HALF, HALF, SINGLE),
    (2 * CHUNK, BRAIN, BRAIN, BRAIN),
    (17, SINGLE, None, SINGLE),
    (48, SINGLE, HALF, HALF),
    (CHUNK, HALF, SINGLE, SINGLE),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors small enough for the interpreter still take several chunks."""
    monkeypatch.setattr(device_table, "CHUNK", CHUNK)


def _decision(skip: bool = False, coefficient: float = 0.37) -> Decision:
    scalars = torch.tensor([float(skip), coefficient, 1.0, 0.0], device=DEVICE)
    return Decision(*scalars.unbind())


def _operands(rows: list[Row] = ROWS, seed: int = 0) -> Operands:
    generator = torch.Generator().manual_seed(seed)
    grads: list[Tensor] = []
    operands = Operands(
        grad=grads, state={"exp_avg": [], "exp_avg_sq": [], "max_exp_avg_sq": [], "momentum_buffer": []}
    )
    for numel, grad, model, state in rows:
        main = torch.randn(numel, generator=generator).to(DEVICE)
        operands.main.append(main)
        operands.model.append(main if model is None else main.to(model))
        grads.append(torch.zeros(numel, dtype=grad, device=DEVICE))
        operands.step.append(torch.zeros((), device=DEVICE))
        for tensors in operands.state.values():
            tensors.append(torch.zeros(numel, dtype=state, device=DEVICE))
    return operands


def _set_grads(operands: Operands, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for grad in operands.grad:
        grad.copy_(torch.randn(grad.shape, generator=generator))


def _update(backend: TritonBackend | ReferenceBackend, operands: Operands, hyper: Hyper, decision: Decision) -> Tensor:
    if isinstance(hyper, AdamHyper):
        return backend.adam_(operands, hyper, decision)
    if isinstance(hyper, SgdHyper):
        return backend.sgd_(operands, hyper, decision)
    return backend.lion_(operands, hyper, decision)


def _everything(operands: Operands) -> list[Tensor]:
    states = [tensor for tensors in operands.state.values() for tensor in tensors]
    return [*operands.model, *operands.main, *operands.grad, *states, *operands.step]


def _same(left: Operands, right: Operands) -> bool:
    return all(bits_equal(a, b) for a, b in zip(_everything(left), _everything(right), strict=True))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count launches by kernel."""
    from megascale.kernels.triton import kernels as triton_kernels

    counts: Counter[str] = Counter()
    kind: Any = type(triton_kernels.adam_kernel)
    launch = kind.run

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        counts[kernel.__name__] += 1
        return launch(kernel, *args, **options)

    monkeypatch.setattr(kind, "run", run)
    return counts


LONG = [pytest.param(name, 100, marks=pytest.mark.slow) for name in ("adamw", "sgd_nesterov", "lion")]


@pytest.mark.parametrize(("name", "steps"), [*((name, 4) for name in HYPERS), *LONG])
def test_update_has_the_bits_of_the_reference(name: str, steps: int) -> None:
    """Invariant 3: main and model params, state and step counts are bitwise the reference's, with skips between.

    Rows of one call differ in length and in every dtype.
    """
    backend, reference = TritonBackend(), ReferenceBackend()
    ours, theirs = _operands(), _operands()
    for step in range(steps):
        _set_grads(ours, seed=step)
        _set_grads(theirs, seed=step)
        decision = _decision(skip=step % 5 == 2)
        flags = _update(backend, ours, HYPERS[name], decision)
        assert torch.equal(flags, _update(reference, theirs, HYPERS[name], decision))
    assert _same(ours, theirs)


@pytest.mark.parametrize("name", cases(HYPERS, quick=lambda name: name in ("adamw", "sgd_nesterov", "lion")))
def test_skipped_step_writes_nothing(name: str) -> None:
    """Invariant 2: NaN and inf gradients leave every bit alone, also in the very first step and beside NaN payloads."""
    backend = TritonBackend()
    operands = _operands()
    payload = torch.tensor([0x7FC12345, -1], dtype=torch.int32, device=DEVICE).view(torch.float32)
    for step in range(3):
        _set_grads(operands, seed=step)
        for grad in operands.grad:
            grad[: step + 1] = (math.nan, math.inf, -math.inf)[step]
        operands.main[3][7:9] = payload
        before = copy.deepcopy(operands)
        _update(backend, operands, HYPERS[name], _decision(skip=True, coefficient=math.nan))
        assert _same(before, operands)
        _set_grads(operands, seed=10 + step)
        _update(backend, operands, HYPERS[name], _decision())
        assert not _same(before, operands)


@st.composite
def _views(draw: st.DrawFn) -> tuple[int, int, torch.dtype, torch.dtype, torch.dtype, bool]:
    numel = draw(st.one_of(st.integers(0, 40), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 16, 3 * CHUNK + 1])))
    offset = draw(st.integers(0, 17))
    grad, model, state = (draw(st.sampled_from([HALF, BRAIN, SINGLE])) for _ in range(3))
    return numel, offset, grad, model, state, draw(st.booleans())


def _in_buffers(
    views: list[tuple[int, int, torch.dtype, torch.dtype, torch.dtype, bool]],
) -> tuple[Operands, list[Tensor]]:
    """Return operands that are views into larger buffers, of every second element where asked, and the buffers."""
    generator = torch.Generator().manual_seed(len(views))
    grads: list[Tensor] = []
    operands, buffers = Operands(grad=grads, state={"exp_avg": [], "exp_avg_sq": []}), []
    for numel, offset, grad, model, state, strided in views:
        made = []
        for dtype in (SINGLE, model, grad, state, state):
            buffer = torch.rand(2 * numel + offset + 20, generator=generator).to(DEVICE, dtype)
            buffers.append(buffer)
            made.append(buffer[offset : offset + 2 * numel : 2] if strided else buffer[offset : offset + numel])
        for column, tensor in zip((operands.main, operands.model, grads, *operands.state.values()), made, strict=True):
            column.append(tensor)
        operands.step.append(torch.full((), 3.0, device=DEVICE))
    return operands, buffers


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_views(), min_size=1, max_size=4))
def test_any_shape_dtype_and_alignment(
    views: list[tuple[int, int, torch.dtype, torch.dtype, torch.dtype, bool]],
) -> None:
    """An update of views at any offset has the reference's bits; no bit next to a view changes. Counts are exact."""
    hyper = AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, False)
    (ours, our_buffers), (theirs, their_buffers) = _in_buffers(views), _in_buffers(views)
    backend, reference = TritonBackend(), ReferenceBackend()
    stats, exact = backend.measure(ours.grad, True), reference.measure(theirs.grad, True)
    assert stats.zeros is not None
    assert exact.zeros is not None
    assert torch.equal(stats.zeros, exact.zeros)
    assert torch.equal(stats.non_finite, exact.non_finite)
    # fp32 within a chunk of 64 elements: at most 63 roundings of 6e-8, and pairwise sums make fewer
    torch.testing.assert_close(stats.sum_squares, exact.sum_squares, rtol=1e-6, atol=0)
    flags = backend.adam_(ours, hyper, _decision())
    assert torch.equal(flags, reference.adam_(theirs, hyper, _decision()))
    for left, right in zip([*our_buffers, *ours.step], [*their_buffers, *theirs.step], strict=True):
        assert bits_equal(left, right)


def test_statistics_across_chunks_repeat_bitwise() -> None:
    """Counts are exact, sums are within fp32, empty and fp64 gradients have their place, and bits repeat."""
    generator = torch.Generator().manual_seed(0)
    sizes = [5 * CHUNK + 3, 0, 1, CHUNK, 33, 2 * CHUNK + 16]
    dtypes = [HALF, HALF, BRAIN, SINGLE, torch.float64, BRAIN]
    grads = [torch.randn(n, generator=generator).to(DEVICE, d) for n, d in zip(sizes, dtypes, strict=True)]
    grads[0][::3], grads[3][5:9], grads[4][0] = 0, 0, 0
    exact = ReferenceBackend().measure(grads, True)
    stats = TritonBackend().measure(grads, True)
    assert stats.zeros is not None
    assert exact.zeros is not None
    assert torch.equal(stats.zeros, exact.zeros)
    torch.testing.assert_close(stats.sum_squares, exact.sum_squares, rtol=1e-6, atol=0)
    again = TritonBackend().measure([grad.clone() for grad in grads], True)
    assert all(bits_equal(a, b) for a, b in zip(stats, again, strict=True) if a is not None and b is not None)
    grads[0][CHUNK - 1], grads[0][-1], grads[3][0], grads[4][1] = math.inf, math.nan, -math.inf, math.nan
    stats = TritonBackend().measure(grads, False)
    assert stats.non_finite.tolist() == [2, 0, 0, 1, 1, 0]
    assert stats.sum_squares.isfinite().tolist() == [False, True, True, False, False, True]
    assert stats.zeros is None


@pytest.mark.parametrize("model", [HALF, BRAIN])
def test_write_back_rounds_as_torch_does(model: torch.dtype) -> None:
    """Ties go to even, subnormals and infinities are kept, NaN stays NaN, fp16 overflow is flagged per parameter."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x00008000, 0x7F7FFFFF, 0x33000000, 0x33000001])
    values = torch.cat([bits.int().view(SINGLE), torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])])
    nan = torch.tensor([0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32).view(SINGLE)
    below, above = torch.tensor([-65519.996, 1.0]), torch.tensor([1.0, -65520.0])
    far = torch.cat([torch.ones(CHUNK), torch.tensor([math.nan]), torch.ones(CHUNK)])
    mains = [main.to(DEVICE) for main in (values, nan, below, above, far, below[:0])]
    models = [torch.empty_like(main, dtype=model) for main in mains]
    flags = TritonBackend().write_back_(mains, models)
    assert flags.dtype == torch.bool
    assert flags.tolist() == [model == HALF and index in (0, 1, 3, 4) for index in range(6)]
    for main, rounded in zip(mains, models, strict=True):
        expected = main.to(model)
        assert torch.equal(rounded.isnan(), expected.isnan())
        assert bits_equal(rounded[~rounded.isnan()], expected[~expected.isnan()])


def test_flag_of_overflow_is_found_in_any_chunk_and_cleared() -> None:
    """An update flags the row whose main param outgrows fp16 in any chunk, until it is small again."""
    operands = _operands([(4 * CHUNK, HALF, HALF, SINGLE), (4 * CHUNK, BRAIN, BRAIN, SINGLE), (9, HALF, HALF, SINGLE)])
    backend, hyper = TritonBackend(), SgdHyper(0.0, 0.0, 0.0, 0.0, False, False)
    for at in (0, CHUNK + 1, 4 * CHUNK - 1):
        for main in operands.main[:2]:
            main[at] = 70000.0
        assert backend.sgd_(operands, hyper, _decision()).tolist() == [True, False, False]
        assert backend.sgd_(operands, hyper, _decision(skip=True)).tolist() == [True, False, False]
        for main in operands.main[:2]:
            main[at] = 1.0
        assert backend.sgd_(operands, hyper, _decision()).tolist() == [False, False, False]


@pytest.mark.parametrize("name", ["adamw", "sgd_dampening_maximize"])
def test_step_counts_once_per_parameter(name: str) -> None:
    """However many chunks a parameter has, also none of any length, a landed step adds 1 and a skipped one adds 0."""
    operands = _operands([(numel, HALF, HALF, SINGLE) for numel in (0, 1, CHUNK, 7 * CHUNK + 1)])
    backend = TritonBackend()
    for step in range(6):
        _update(backend, operands, HYPERS[name], _decision(skip=step in (0, 4)))
    assert [step.item() for step in operands.step] == [4.0] * 4


def test_lr_as_a_tensor_is_read_on_the_device() -> None:
    """A changed lr takes effect as a float and as an fp64 tensor with the same bits; nothing is read on the host."""
    rates = [1e-2, 3e-3, 0.0, 0.7]
    given_lr = torch.zeros((), dtype=torch.float64, device=DEVICE)
    by_float, by_tensor = _operands(), _operands()
    backend = TritonBackend()
    with OperatorCounter() as counter:
        for step, rate in enumerate(rates):
            given_lr.fill_(rate)
            for operands, lr in ((by_float, rate), (by_tensor, given_lr)):
                _set_grads(operands, seed=step)
                backend.adam_(operands, AdamHyper(lr, 0.9, 0.999, 1e-8, 0.1, True, False, False), _decision())
                backend.measure(operands.grad, True)
    assert counter.host_reads == 0
    assert _same(by_float, by_tensor)


def test_launches_do_not_grow_with_tensors(launches: Counter[str]) -> None:
    """Invariant 8: one launch for statistics and one for the update, for 8 and 60 tensors."""
    for count in (8, 60):
        operands = _operands([(1 + index % 3, HALF, HALF, SINGLE) for index in range(count)])
        backend = TritonBackend()
        launches.clear()
        backend.measure(operands.grad, False)
        backend.adam_(operands, HYPERS["adamw"], _decision())  # type: ignore[arg-type]
        assert launches == {"measure_kernel": 1, "adam_kernel": 1}


def test_launches_once_per_combination_of_dtypes(launches: Counter[str]) -> None:
    """Rows of other dtypes are launches of their own, whatever the order; fp64 and strided rows need none."""
    rows: list[Row] = [(4, HALF, HALF, SINGLE), (4, BRAIN, BRAIN, SINGLE), (5, HALF, HALF, SINGLE)] * 3
    operands = _operands(rows)
    operands.main[4] = torch.ones(8, device=DEVICE)[::2]
    TritonBackend().sgd_(operands, HYPERS["sgd"], _decision())  # type: ignore[arg-type]
    assert launches == {"sgd_kernel": 2}


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
    operands, backend = _operands(ROWS[1:3]), TritonBackend()
    for step in range(3):
        _set_grads(operands, seed=step)
        backend.measure(operands.grad, True)
        _update(backend, operands, HYPERS["adamw"], _decision())
    assert (len(made), len(copies)) == (2, 3)  # tables of the statistics and the update, and the addresses
    kept, *others = operands.grad
    operands.grad = [kept.clone(), *others]
    backend.measure(operands.grad, True)
    _update(backend, operands, HYPERS["adamw"], _decision())
    assert (len(made), len(copies)) == (2, 4)
    assert copies[-1].tolist() == [grad.data_ptr() for grad in operands.grad]
    operands.grad = [kept, *others]
    _update(backend, operands, HYPERS["adamw"], _decision())
    assert (len(made), len(copies)) == (2, 4)
    backend.measure([kept], True)
    backend.measure([kept.view(torch.bfloat16)], True)
    backend.measure([kept[:5]], True)
    backend.measure([kept[:10:2]], True)
    assert len(made) == 6


def test_parts_of_measured_gradients_are_not_copied_again(copies: list[Tensor]) -> None:
    """Gradients of several param groups are measured together and updated apart: their addresses travel once."""
    one, other = _operands(ROWS[1:2], seed=1), _operands(ROWS[2:3], seed=2)
    one.grad, other.grad = TensorList(one.grad), TensorList(other.grad)
    addresses = grad_addresses.GradAddresses()
    whole = addresses.find(TensorList.joined([one.grad, other.grad]))
    parts = [addresses.find(part) for part in (one.grad, other.grad)]
    assert len(copies) == 1
    assert torch.cat(parts).tolist() == whole.tolist() == [grad.data_ptr() for grad in (*one.grad, *other.grad)]


def _find(cache: device_table.PlanCache, operands: Operands) -> device_table.Plan:
    columns = [device_table.Column(tensors) for tensors in (operands.main, operands.model, operands.state["exp_avg"])]
    beside = {device_table.STEP: device_table.Column(operands.step)}
    return cache.find(columns, beside, device_table.Column(operands.grad))


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
    operands, cache = _operands(), device_table.PlanCache()
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
    operands, cache = _operands([(48, SINGLE, HALF, SINGLE), (17, SINGLE, HALF, SINGLE)]), device_table.PlanCache()
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


def test_memory_of_a_copy_is_not_written_again(copies: list[Tensor]) -> None:
    """A copy may still be under way when gradients have moved again: each has host memory of its own."""
    grads, addresses = [[torch.ones(3, device=DEVICE)] for _ in range(5)], grad_addresses.GradAddresses()
    room = Room()
    for tensors in grads:
        addresses.find(TensorList(tensors, room=room))
    assert len({copy.data_ptr() for copy in copies}) == len(copies) == 5
    assert [copy.tolist() for copy in copies] == [[grad.data_ptr()] for [grad] in grads]


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
    ours, theirs = _operands(), _operands()
    for step in range(3):
        ours.grad = [torch.zeros(len(grad) + step, dtype=grad.dtype, device=DEVICE)[step:] for grad in ours.grad]
        _set_grads(ours, seed=step)
        _set_grads(theirs, seed=step)
        assert backend.measure(ours.grad, True).zeros is not None
        _update(backend, ours, HYPERS["adamw"], _decision())
        _update(reference, theirs, HYPERS["adamw"], _decision())
    assert _same(ours, theirs)


def test_only_gradients_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operands that stay, an update asks for the addresses of its gradients alone, also where those have moved."""
    monkeypatch.setenv(tensor_reader.ENVIRONMENT_VARIABLE, "python")
    asked = []
    of_each = tensor_list._of_each

    def noted(look: Any, tensors: Any) -> list[Any]:
        asked.extend([tensors] if look is torch.Tensor.data_ptr else [])
        return of_each(look, tensors)

    monkeypatch.setattr(tensor_list, "_of_each", noted)
    operands, backend = _operands(ROWS[1:4]), TritonBackend()
    _update(backend, operands, HYPERS["adamw"], _decision())
    assert len(asked) == 6  # main, model, grad, exp_avg, exp_avg_sq, step
    for step in range(2):
        asked.clear()
        _set_grads(operands, seed=step)
        operands.grad = [grad.clone() for grad in operands.grad]
        _update(backend, operands, HYPERS["adamw"], _decision())
        assert [list(tensors) for tensors in asked] == [operands.grad]


def test_capture_reuses_tables_and_refuses_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under graph capture what was made before is taken and kept for good; tensors that have moved are a UsageError,
    gradients too.
    """
    monkeypatch.setattr(device_table, "CACHE_BYTES", 0)
    monkeypatch.setattr(grad_addresses, "CACHE_BYTES", 0)
    operands, backend = _operands(ROWS[1:3]), TritonBackend()

    def found(grads: Sequence[Tensor]) -> tuple[device_table.Plan, Tensor]:
        column = device_table.Column(grads)
        return backend._plans.find([], grads=column), backend._addresses.find(column.tensors)

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


def test_autograd_hears_of_the_writes() -> None:
    """Versions of what an update writes go up, as with torch's own kernels; those of gradients do not."""
    operands = _operands(ROWS[1:3])
    before = [tensor._version for tensor in _everything(operands)]
    grads = [tensor._version for tensor in operands.grad]
    _update(TritonBackend(), operands, HYPERS["adam_l2_amsgrad"], _decision())
    changed = [*operands.model, *operands.main, *operands.step, *operands.state["max_exp_avg_sq"]]
    assert all(tensor._version > 0 for tensor in changed)
    assert [tensor._version for tensor in operands.grad] == grads
    assert sum(tensor._version for tensor in _everything(operands)) > sum(before)


def test_tensors_on_several_devices_are_refused() -> None:
    """A raw pointer to another device would be read as if it were on this one."""
    backend, elsewhere = TritonBackend(), [torch.ones(2, device=DEVICE), torch.ones(2, device="meta")]
    for _ in range(2):
        with pytest.raises(ArgumentError, match="put them on one"):
            backend.measure(elsewhere, False)
        backend.measure([torch.ones(2, device=DEVICE) for _ in range(2)], False)


def test_missing_triton_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without triton the backend says what to install, when it is asked for."""
    import megascale.kernels.triton as package

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megascale.kernels.triton.kernels", raising=False)
    monkeypatch.delattr(package, "kernels", raising=False)
    with pytest.raises(UsageError, match="pip install triton"):
        TritonBackend()


COMPILE_ALL = """
import re
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megascale.errors import UsageError
from megascale.kernels.triton import kernels
from megascale.kernels.triton.backend import TritonBackend

try:
    TritonBackend().measure([torch.ones(3)], False)
except UsageError as error:
    print(error)

TYPES = {"flags": "*u8", "lr": "*fp64", "log_beta1": "fp64", "log_beta2": "fp64"}
TYPES |= dict.fromkeys(("rows", "chunk_rows", "grads", "counters", "arrivals"), "*i64")
TYPES |= dict.fromkeys(("found_inf", "coefficient", "scale", "numbers"), "*fp32")
TYPES |= dict.fromkeys(("partials", "stats", "sum_squares", "non_finite", "zeros", "errors"), "*fp64")
TYPES |= dict.fromkeys(("shares", "contrasts"), "*fp64") | {"scaled": "fp64"}
TYPES |= dict.fromkeys(("vector", "num_zeros"), "*fp64") | dict.fromkeys(("stride", "num_tensors"), "i64")
TYPES |= dict.fromkeys(("growth_tracker", "hysteresis_tracker"), "*i64")
TYPES |= {"clip_grad": "fp64", "epsilon": "fp64", "growth_interval": "i64", "hysteresis": "i64"}
DTYPES = {"MODEL_DTYPE": tl.float16, "GRAD_DTYPE": tl.bfloat16}
FLAGS = {"COUNT_ZEROS": True, "DAMPENED": True, "NESTEROV": True, "DECOUPLED": True, "L2": True, "MAXIMIZE": True}
FLAGS |= {"HELD": False, "CODES": False, "SCALED": True, "CLIPS": True, "COMPARES": True, "EACH_CLEAN_STEP": False}
for name in ("adam", "sgd", "lion", "write_back", "measure", "total", "decide", "rescale"):
    kernel = getattr(kernels, f"{name}_kernel")
    known = {"COLUMNS": 11, "CHUNK": 1 << 14, "BLOCK": 1 << 10, "FAN": 256} | DTYPES | FLAGS
    constants = {p: known.get(p, tl.float32) for p in kernel.arg_names if p.isupper()}
    signature = {p: "constexpr" if p in constants else TYPES.get(p, "fp32") for p in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(p),): value for p, value in constants.items()})
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    # An update's powers in fp64 are made of fused operations.
    mixed = r"fma\\.rn\\.f(?:32|64)" if name in ("total", "decide") else r"fma\\.rn\\.f32"
    fused, wide = len(re.findall(mixed, ptx)), len(re.findall(r"ld\\.global\\.v[24]", ptx))
    approximate = len(re.findall(r"(?:div|sqrt)\\.(?:approx|full)", ptx))
    print(name, "fused", fused, "approximate", approximate, "wide" if wide else "narrow")
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path: Any) -> None:
    """Outside the interpreter CPU tensors are refused, and every kernel compiles for a GPU that need not be there.

    What the interpreter cannot show: no fp32 multiplication is fused with an addition and no division is approximate,
    which would change bits, and aligned tensors are read in vectors.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_ALL], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert "set TRITON_INTERPRET=1 before Python starts" in first
    kernels = ("adam", "sgd", "lion", "write_back", "measure", "total", "decide", "rescale")
    wide = ["wide" if name in kernels[:5] else "narrow" for name in kernels]
    assert lines == [f"{name} fused 0 approximate 0 {width}" for name, width in zip(kernels, wide, strict=True)]
