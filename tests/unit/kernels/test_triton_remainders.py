"""The triton kernels on main params held as remainders: the reference's bits, and nothing in fp32 is in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from megascale.kernels import (
    AdamHyper,
    Backend,
    Decision,
    LionHyper,
    Operands,
    ReferenceBackend,
    SgdHyper,
)
from megascale.kernels.remainders import encode
from megascale.kernels.triton import device_table
from megascale.kernels.triton.backend import TritonBackend
from tests.training import bits_equal
from tests.unit.kernels.test_remainders import edge_pairs
from tests.unit.kernels.test_triton_vectors import at_address
from tests.unit.kernels.triton_cases import BRAIN, CHUNK, DEVICE, HALF, SINGLE, decision_of

pytestmark = pytest.mark.usefixtures("small_chunks")

MOST = 65519.996
"""The largest fp32 number that rounds to a finite one in fp16."""
Update = Callable[[Backend, Operands, Decision], Tensor]
RULES: dict[str, tuple[Update, list[str]]] = {
    "adam": (
        lambda backend, operands, decision: backend.adam_(
            operands, AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, False), decision
        ),
        ["exp_avg", "exp_avg_sq"],
    ),
    "amsgrad": (
        lambda backend, operands, decision: backend.adam_(
            operands, AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, False, True, True), decision
        ),
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    ),
    "sgd": (
        lambda backend, operands, decision: backend.sgd_(
            operands, SgdHyper(1e-2, 0.9, 0.3, 0.1, False, False), decision
        ),
        ["momentum_buffer"],
    ),
    "sgd without momentum": (
        lambda backend, operands, decision: backend.sgd_(
            operands, SgdHyper(0.25, 0.0, 0.0, 0.0, False, False), decision
        ),
        [],
    ),
    "lion": (
        lambda backend, operands, decision: backend.lion_(operands, LionHyper(1e-3, 0.9, 0.99, 0.1, False), decision),
        ["exp_avg"],
    ),
}
# Elements, dtypes of gradient, model and state, and the addresses modulo 16 of remainder, model, gradient and states.
Row = tuple[int, torch.dtype, torch.dtype, torch.dtype, list[int]]


@st.composite
def _rows(draw: st.DrawFn) -> Row:
    numel = draw(st.sampled_from([0, 4, 16, CHUNK - 16, CHUNK, 2 * CHUNK])) + draw(st.integers(0, 9))
    model = draw(st.sampled_from([HALF, BRAIN]))
    grad, state = (draw(st.sampled_from([HALF, BRAIN, SINGLE])) for _ in range(2))
    addresses = [0] * 6
    if draw(st.booleans()):
        for index, dtype in enumerate((model, model, grad, state, state, state)):
            addresses[index] = draw(st.sampled_from([a for a in (0, 2, 4, 8, 12) if a % dtype.itemsize == 0]))
    return numel, grad, model, state, addresses


def _operands(rows: list[Row], names: list[str]) -> tuple[Operands, list[Tensor]]:
    """Return operands that are held, and the buffers that they are views of. Main params have no memory."""
    generator = torch.Generator().manual_seed(len(rows))
    grads: list[Tensor] = []
    operands, buffers = Operands(grad=grads, state={name: [] for name in names}), []
    for numel, grad, dtype, state, addresses in rows:
        main = torch.randn(numel, generator=generator) * torch.logspace(-9, 4, numel)
        model, remainder = encode(main, dtype)
        states = [torch.rand(numel, generator=generator).to(state) for _ in names]
        values = [remainder, model, torch.randn(numel, generator=generator).to(grad), *states]
        columns = [operands.remainder, operands.model, grads, *operands.state.values()]
        for column, value, address in zip(columns, values, addresses, strict=False):
            view, buffer = at_address(value.to(DEVICE), address)
            column.append(view)
            buffers.append(buffer)
        hollow = torch.empty(numel, device=DEVICE)
        hollow.untyped_storage().resize_(0)
        operands.main.append(hollow)
        operands.step.append(torch.full((), 3.0, device=DEVICE))
    return operands, buffers


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(_rows(), min_size=1, max_size=3), skip=st.booleans())
def test_held_rows_at_any_address_and_length(rule: str, rows: list[Row], skip: bool) -> None:
    """Model params, remainders, state and flags are the reference's, and no bit beside them changes."""
    update, names = RULES[rule]
    (ours, our_buffers), (theirs, their_buffers) = _operands(rows, names), _operands(rows, names)
    flags = update(TritonBackend(), ours, decision_of(skip))
    assert torch.equal(flags, update(ReferenceBackend(), theirs, decision_of(skip)))
    for left, right in zip([*our_buffers, *ours.step], [*their_buffers, *theirs.step], strict=True):
        assert bits_equal(left, right)


def _held(operands: Operands, numels: list[int], address: int) -> tuple[Operands, list[Tensor]]:
    """Return what is held, with memory for main params at an address, and the buffers of that."""
    views = [at_address(torch.zeros(numel, device=DEVICE), address) for numel in numels]
    mains = [view for view, _ in views]
    held = Operands(model=operands.model, remainder=operands.remainder, main=mains)
    return held, [buffer for _, buffer in views]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(_rows(), min_size=1, max_size=3), skip=st.booleans(), address=st.sampled_from([0, 0, 4, 8]))
def test_decoding_and_encoding_alone(rows: list[Row], skip: bool, address: int) -> None:
    """For updates in plain tensor code: as specified, a launch per dtype; what fp16 cannot hold is kept and flagged."""
    (ours, our_buffers), (theirs, their_buffers) = _operands(rows, []), _operands(rows, [])
    numels = [row[0] for row in rows]
    (our_held, our_mains), (their_held, their_mains) = _held(ours, numels, address), _held(theirs, numels, address)
    backend, reference = TritonBackend(), ReferenceBackend()
    backend.decode_(our_held)
    reference.decode_(their_held)
    assert all(map(bits_equal, our_mains, their_mains))
    for held in (our_held, their_held):
        for main in held.main:
            main.mul_(-3.7)
            main[7::23] = 1e9
    found_inf = decision_of(skip).found_inf
    assert torch.equal(backend.encode_(our_held, found_inf), reference.encode_(their_held, found_inf))
    for left, right in zip(our_buffers, their_buffers, strict=True):
        assert bits_equal(left, right)


def _written(mains: list[Tensor], dtype: torch.dtype) -> tuple[Operands, Tensor]:
    """Return what holds ``mains`` after a step of SGD from zeros, and its flags."""
    numels = [len(main) for main in mains]
    operands, _ = _operands([(numel, SINGLE, dtype, SINGLE, [0] * 6) for numel in numels], [])
    for main, model, remainder, grad in zip(mains, operands.model, operands.remainder, operands.grad, strict=True):
        for tensor in (model, remainder):
            tensor.zero_()
        grad.copy_(main)
    hyper = SgdHyper(-1.0, 0.0, 0.0, 0.0, False, False)
    return operands, TritonBackend().sgd_(operands, hyper, decision_of(coefficient=1.0))


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_numbers_are_held_as_specified(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of all bit patterns, and numbers halfway between two model params with their neighbours."""
    monkeypatch.setattr(device_table, "CHUNK", 1 << 14)
    main = torch.arange(-(1 << 31), 1 << 31, 40_093).to(torch.int32).view(SINGLE)
    upper = torch.arange(-(1 << 15), 1 << 15, 7).to(torch.int32) << 16
    halfway = torch.cat([upper + part for part in (0x7FFF, 0x8000, 0x8001)]).view(SINGLE)
    small = (torch.arange(256) + 0.5) * 2.0**-24
    small = torch.cat([small, small.nextafter(torch.tensor(1.0)), small.nextafter(torch.tensor(0.0))])
    main = torch.cat([main, halfway, small, -small])
    main = (main[main.abs() < MOST] if dtype == HALF else main[~main.isnan()]) + 0.0
    operands, flags = _written([main.to(DEVICE)], dtype)
    model, remainder = encode(main.to(DEVICE), dtype)
    assert bits_equal(operands.model[0], model)
    assert bits_equal(operands.remainder[0], remainder)
    assert not flags.any()


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_what_fp16_cannot_hold_is_kept_and_flagged(dtype: torch.dtype) -> None:
    """In any chunk; beside it elements move. Infinities and NaN are written, and flagged too. bf16 holds all."""
    mains = [torch.ones(3 * CHUNK + 5) for _ in range(5)]
    for main, at, value in zip(
        mains, (0, CHUNK + 1, -1, 2, 3), (65520.0, -1e9, torch.inf, torch.nan, 1.0), strict=True
    ):
        main[at] = value
    operands, flags = _written([main.to(DEVICE) for main in mains], dtype)
    assert flags.tolist() == [dtype == HALF] * 4 + [False]
    for main, model, remainder in zip(mains, operands.model, operands.remainder, strict=True):
        expected, left = encode(main.to(DEVICE), dtype)
        refused = expected.isinf() & main.to(DEVICE).isfinite()
        there = ~expected.isnan()
        assert torch.equal(model.isnan(), expected.isnan())
        assert torch.equal(model[there], torch.where(refused, 0, expected)[there])
        assert torch.equal(remainder, torch.where(refused, 0, left))


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_pairs_that_no_encoding_produces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model params beside remainders that others' writes left are decoded as by the reference."""
    monkeypatch.setattr(device_table, "CHUNK", 1 << 14)
    model, remainder = (one.to(DEVICE) for one in edge_pairs(dtype, 61))
    held = [
        Operands(model=[model], remainder=[remainder], main=[torch.empty_like(model, dtype=SINGLE)]) for _ in range(2)
    ]
    TritonBackend().decode_(held[0])
    ReferenceBackend().decode_(held[1])
    (ours,), (theirs,) = (each.main for each in held)
    assert torch.equal(ours.isnan(), model.isnan())
    assert bits_equal(ours[~model.isnan()], theirs[~model.isnan()])


def test_one_launch_updates_all_that_is_held_in_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors; and torch is told of every written weight, so that nobody takes our write for another's."""
    from megascale.kernels.triton import kernels as triton_kernels

    names = []
    kind: Any = type(triton_kernels.update_kernel)
    run = kind.run

    def noted(kernel: Any, *args: Any, **options: Any) -> Any:
        names.append(kernel.__name__)
        return run(kernel, *args, **options)

    monkeypatch.setattr(kind, "run", noted)
    update, states = RULES["adam"]
    operands, _ = _operands([(n, HALF, HALF, SINGLE, [0] * 6) for n in range(1, 30)], states)
    before = [tensor._version for tensor in operands.model]
    update(TritonBackend(), operands, decision_of())
    after = [tensor._version for tensor in operands.model]
    assert names == ["update_kernel"]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1] * len(before)
