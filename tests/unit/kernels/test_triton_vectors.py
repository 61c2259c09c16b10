"""Which elements the triton kernels take as vectors, and that bits do not depend on addresses and lengths."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

pytest.importorskip("triton")

from megascale.kernels import AdamHyper, Backend, Decision, LionHyper, Operands, ReferenceBackend, SgdHyper
from megascale.kernels.triton import backend as triton_backend
from megascale.kernels.triton.backend import TritonBackend
from tests.training import bits_equal
from tests.unit.kernels.triton_cases import BRAIN, CHUNK, DEVICE, HALF, SINGLE, decision_of

pytestmark = pytest.mark.usefixtures("small_chunks")

Numbers = NDArray[Any]
ADAMW = AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, False)

interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="looks into kernels as they run, in the interpreter")


def at_address(values: Tensor, address: int) -> tuple[Tensor, Tensor]:
    """Return a copy whose address, modulo 16, is as given, in a larger buffer, and the buffer."""
    buffer = torch.full((values.numel() + 32,), 3.0, dtype=values.dtype, device=DEVICE)
    first = (address - buffer.data_ptr()) % 16 // values.element_size()
    view = buffer[first : first + values.numel()]
    view.copy_(values)
    assert view.data_ptr() % 16 == address or not values.numel()
    return view, buffer


# Elements, dtypes of gradient, model and state, and the addresses modulo 16 of main, model, gradient and states.
Row = tuple[int, torch.dtype, torch.dtype, torch.dtype, list[int]]


@st.composite
def _rows(draw: st.DrawFn) -> Row:
    whole = draw(st.sampled_from([0, 4, 8, 16, CHUNK - 16, CHUNK, 2 * CHUNK]))
    numel = whole + draw(st.integers(0, 15))
    dtypes = [draw(st.sampled_from([HALF, BRAIN, SINGLE])) for _ in range(3)]
    addresses = [0] * 5
    if draw(st.booleans()):
        grad, model, state = dtypes
        for index, dtype in enumerate((SINGLE, model, grad, state, state)):
            addresses[index] = draw(st.sampled_from([a for a in (0, 2, 4, 8, 12) if a % dtype.itemsize == 0]))
    return numel, dtypes[0], dtypes[1], dtypes[2], addresses


def _operands(rows: list[Row], names: list[str]) -> tuple[Operands, list[Tensor]]:
    """Return an update's operands, and the buffers they are views of."""
    generator = torch.Generator().manual_seed(len(rows))
    grads: list[Tensor] = []
    operands, buffers = Operands(grad=grads, state={name: [] for name in names}), []
    for numel, grad, model, state, addresses in rows:
        columns = [operands.main, operands.model, grads, *operands.state.values()]
        for column, dtype, address in zip(columns, (SINGLE, model, grad, state, state), addresses, strict=False):
            values = operands.main[-1] if column is operands.model else torch.rand(numel, generator=generator)
            view, buffer = at_address(values.to(DEVICE, dtype), address)
            column.append(view)
            buffers.append(buffer)
        operands.step.append(torch.full((), 3.0, device=DEVICE))
    return operands, buffers


def _adam(backend: Backend, operands: Operands, decision: Decision) -> Tensor:
    return backend.adam_(operands, ADAMW, decision)


def _sgd(backend: Backend, operands: Operands, decision: Decision) -> Tensor:
    return backend.sgd_(operands, SgdHyper(1e-2, 0.9, 0.0, 0.1, True, False), decision)


def _lion(backend: Backend, operands: Operands, decision: Decision) -> Tensor:
    return backend.lion_(operands, LionHyper(1e-3, 0.9, 0.99, 0.1, False), decision)


Update = Callable[[Backend, Operands, Decision], Tensor]
UPDATES: dict[str, tuple[Update, list[str]]] = {
    "adam": (_adam, ["exp_avg", "exp_avg_sq"]),
    "sgd": (_sgd, ["momentum_buffer"]),
    "lion": (_lion, ["exp_avg"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", UPDATES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(_rows(), min_size=1, max_size=3), skip=st.booleans())
def test_updates_at_any_address_and_length(rule: str, rows: list[Row], skip: bool) -> None:
    """Every tensor of a row at an address of its own, whole vectors or not: the reference's bits, none beside them."""
    update, names = UPDATES[rule]
    (ours, our_buffers), (theirs, their_buffers) = _operands(rows, names), _operands(rows, names)
    decision = decision_of(skip)
    flags, expected = update(TritonBackend(), ours, decision), update(ReferenceBackend(), theirs, decision)
    assert torch.equal(flags, expected)
    for left, right in zip([*our_buffers, *ours.step], [*their_buffers, *theirs.step], strict=True):
        assert bits_equal(left, right)


def _in_lanes(rows: Numbers, lanes: int) -> Numbers:
    """Return the sum of each row, shape [rows]: the i-th number to lane i % lanes, then lanes in pairs."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % lanes)))
    sums = np.zeros_like(padded[:, :lanes])
    for at in range(0, padded.shape[1], lanes):
        sums += padded[:, at : at + lanes]
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]


def sum_as_documented(grad: Tensor, chunk: int, fan: int = 256) -> float:
    """Return the sum of squares in the order that TritonBackend's docstring states."""
    squares: Numbers = np.square(grad.float().cpu().numpy())
    chunks = _in_lanes(np.pad(squares, (0, -len(squares) % chunk)).reshape(-1, chunk), 2048).astype(np.float64)
    groups = _in_lanes(np.pad(chunks, (0, -len(chunks) % fan)).reshape(-1, fan), fan)
    return float(_in_lanes(groups[None], fan)[0])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, CHUNK + 20), st.sampled_from([HALF, BRAIN, SINGLE]), st.sampled_from([0, 2, 4, 8, 12]))
def test_sums_of_squares_do_not_depend_on_addresses(numel: int, dtype: torch.dtype, address: int) -> None:
    """Invariant 14: the same bits at every address, those of the documented order; counts are the reference's."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(DEVICE, dtype)
    values[numel // 2] = 0
    view, _ = at_address(values, address // dtype.itemsize * dtype.itemsize)
    stats = TritonBackend().measure([view], True)
    assert stats.zeros is not None
    assert stats.sum_squares.item() == sum_as_documented(values, CHUNK)
    assert stats.zeros.item() == int((values == 0).sum())
    view[-1] = math.nan
    assert TritonBackend().measure([view], False).non_finite.item() == 1


@pytest.mark.default("256")
@pytest.mark.parametrize("numel", [1, CHUNK, CHUNK + 1, 4 * CHUNK, 4 * CHUNK + 1, 16 * CHUNK, 37 * CHUNK + 5])
def test_chunks_are_added_up_in_their_order_on_two_levels(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one chunk, of one group of chunks, of several, of more groups than a program adds up at once: sums in the
    documented order, counts exact, at every repetition, beside other rows.
    """
    monkeypatch.setattr(triton_backend, "FAN", 4)
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE, HALF) for n in (7, numel, 200)]
    grads[1][-1] = 0
    backend = TritonBackend()
    for _ in range(2):
        stats = backend.measure(grads, True)
        assert stats.zeros is not None
        assert stats.sum_squares.tolist() == [sum_as_documented(grad, CHUNK, 4) for grad in grads]
        assert stats.zeros.tolist() == [int((grad == 0).sum()) for grad in grads]
        assert stats.non_finite.tolist() == [0, 0, 0]
    [[table]] = (plan.tables for plan in backend._measured.values())
    assert not table.counters.any()
    assert not table.arrivals.any()
    grads[1][:: CHUNK // 2] = math.inf
    assert backend.measure(grads, False).non_finite.tolist() == [0, -(-numel // (CHUNK // 2)), 0]


def test_gradients_whose_squares_overflow_are_finite() -> None:
    """fp32 gradients of 1e30: the sum is inf, and no element is counted as non-finite."""
    stats = TritonBackend().measure([torch.full((9,), 1e30, device=DEVICE)], False)
    assert stats.sum_squares.tolist() == [math.inf]
    assert stats.non_finite.tolist() == [0]


@interpreted
@pytest.mark.parametrize("rule", [*UPDATES, "measure"])
def test_all_whole_vectors_are_taken_as_vectors_and_no_pointer_is_promised_that_is_not_aligned(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of aligned rows all but a remainder shorter than a vector goes through vectors, at any length; 16-bit tensors of
    an update need 8 bytes. Where a pointer is promised to be aligned, it is.
    """
    from megascale.kernels.triton import chunks as triton_chunks
    from megascale.kernels.triton import kernels as triton_kernels
    from megascale.kernels.triton import measure as triton_measure

    promised, taken = [], []
    chunk_at = triton_chunks.chunk_at
    whole_vectors_beside = triton_chunks.whole_vectors_beside

    def promise(address: Any, start: Any, dtype: Any, vector: Any) -> Any:
        pointer = chunk_at(address, start, dtype, vector)
        count = int(getattr(vector, "value", vector))
        if count > 1:
            promised.append(int(pointer.handle.data.item()) % (count * dtype.primitive_bitwidth // 8))
        return pointer

    def noted(length: Any, whole: Any) -> Any:
        taken.append((int(length.handle.data.item()), int(whole.handle.data.item())))
        return whole

    def take_beside(grad: Any, row: Any, length: Any, dtype: Any, vector: Any, whole: Any) -> Any:
        return noted(length, whole_vectors_beside(grad, row, length, dtype, vector, whole))

    for module in (triton_chunks, triton_kernels, triton_measure):
        monkeypatch.setattr(module, "chunk_at", promise)
    for module in (triton_kernels, triton_measure):
        monkeypatch.setattr(module, "whole_vectors_beside", take_beside)
    lengths = [1, 3, 4, 7, 9, 12, 16, 30, CHUNK + 5]
    aligned: list[Row] = [(n, HALF, HALF, SINGLE, [0, 8, 8, 0, 0]) for n in lengths]
    apart: list[Row] = [(21, HALF, HALF, SINGLE, [a, b, c, 0, 0]) for a, b, c in ((4, 0, 0), (0, 2, 0), (0, 0, 4))]
    vector = 4
    if rule == "measure":
        vector = 8
        for addresses in ([0], [8]):
            grads = [at_address(torch.ones(n, dtype=HALF), addresses[0])[0] for n in lengths]
            TritonBackend().measure(grads, True)
    else:
        update, names = UPDATES[rule]
        decision = decision_of()
        for rows in (aligned, apart):
            update(TritonBackend(), _operands(rows, names)[0], decision)
    assert promised
    assert not any(promised)
    chunks = [piece for n in lengths for piece in (min(n, CHUNK), n - CHUNK) if piece > 0]
    assert taken[: len(chunks)] == [(n, n // vector * vector) for n in chunks]
    read_alone = [whole for _, whole in taken[len(chunks) :]]
    assert not any(read_alone)
