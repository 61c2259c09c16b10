"""The triton kernels on moments held as 8-bit codes: the reference's bits at any address and length."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from megascale.kernels import AdamHyper, Backend, Decision, Operands, ReferenceBackend
from megascale.kernels.compact_moments import SCALE_SUFFIX, encode_moments
from megascale.kernels.native.backend import NativeBackend
from megascale.kernels.remainders import encode
from megascale.kernels.triton.backend import TritonBackend
from tests.training import bits_equal
from tests.unit.kernels.test_triton_vectors import at_address
from tests.unit.kernels.triton_cases import BRAIN, CHUNK, DEVICE, HALF, SINGLE, decision_of

pytestmark = pytest.mark.usefixtures("small_chunks")

FIRST, SECOND = torch.int8, torch.uint8
Update = Callable[[Backend, Operands, Decision], Tensor]
RULES: dict[str, tuple[Update, dict[str, torch.dtype]]] = {
    "adamw": (
        lambda backend, operands, decision: backend.adam_(
            operands, AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, False), decision
        ),
        {"exp_avg": FIRST, "exp_avg_sq": SECOND},
    ),
    "adam, first moment": (
        lambda backend, operands, decision: backend.adam_(
            operands, AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, False, False, True), decision
        ),
        {"exp_avg": FIRST, "exp_avg_sq": BRAIN},
    ),
    "adamw, second moment": (
        lambda backend, operands, decision: backend.adam_(
            operands, AdamHyper(1e-2, 0.0, 0.999, 1e-8, 0.0, True, False, False), decision
        ),
        {"exp_avg": HALF, "exp_avg_sq": SECOND},
    ),
    "amsgrad": (
        lambda backend, operands, decision: backend.adam_(
            operands, AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.1, False, True, False), decision
        ),
        {"exp_avg": FIRST, "exp_avg_sq": SECOND, "max_exp_avg_sq": SINGLE},
    ),
}
# Elements, index of the first one, step, dtypes of gradient and model (None: the main param itself), and the addresses
# modulo 16 of main param or remainder, model, gradient and states.
Row = tuple[int, int, int, torch.dtype, torch.dtype | None, list[int]]


@st.composite
def _rows(draw: st.DrawFn, held: bool) -> Row:
    numel = draw(st.sampled_from([0, 1, 31, 32, 33, CHUNK - 32, CHUNK, 2 * CHUNK])) + draw(st.integers(0, 9))
    start = 32 * draw(st.sampled_from([0, 1, 100_000_007, 1 << 32]))
    step = draw(st.one_of(st.integers(0, 5000), st.sampled_from([1 << 24, 1 << 31, 3 << 40])))
    grad = draw(st.sampled_from([HALF, BRAIN, SINGLE]))
    model = draw(st.sampled_from([HALF, BRAIN, *([] if held else [None])]))
    addresses = [0] * 6
    if draw(st.booleans()):
        sizes = ((model or SINGLE).itemsize if held else 4, (model or SINGLE).itemsize, grad.itemsize, 4, 4, 4)
        for index, size in enumerate(sizes):
            addresses[index] = draw(st.sampled_from([a for a in (0, 2, 4, 8, 12) if a % size == 0]))
    return numel, start, step, grad, model, addresses


def _states(numel: int, start: int, step: int, dtypes: dict[str, torch.dtype], seed: int) -> dict[str, Tensor]:
    """Return moments as a step leaves them: groups of zeros, and neighbours that differ by some octaves."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(numel, generator=generator).exp2() * 10.0 ** (start % 7 - 3)
    first, second = torch.randn(numel, generator=generator) * spread, torch.rand(numel, generator=generator) * spread**2
    for moment in (first, second):
        moment[32:64] = 0
        moment[5::11] = 0
    count = torch.tensor(float(step))
    made = encode_moments(first, second, dtypes, start, count)
    names = [name for name, dtype in dtypes.items() if dtype in (FIRST, SECOND)]
    held = {name: made.get(name, second).to(dtype) for name, dtype in dtypes.items()}
    if held["exp_avg_sq"].dtype == SECOND:
        held["exp_avg_sq"][96:128] = 0  # as after zero_(): beside scales of other codes
    return held | {name + SCALE_SUFFIX: made[name + SCALE_SUFFIX] for name in names}


def _operands(rows: list[Row], dtypes: dict[str, torch.dtype], held: bool) -> tuple[Operands, list[Tensor]]:
    """Return operands, and the buffers that they are views of."""
    generator = torch.Generator().manual_seed(len(rows))
    grads: list[Tensor] = []
    names = [*dtypes, *(name + SCALE_SUFFIX for name, dtype in dtypes.items() if dtype in (FIRST, SECOND))]
    operands, buffers = Operands(grad=grads, state={name: [] for name in names}), []
    for seed, (numel, start, step, grad, dtype, addresses) in enumerate(rows):
        main = torch.randn(numel, generator=generator)
        gradient = torch.randn(numel, generator=generator) * 10.0 ** (seed - 2)
        gradient[3::5] = 0
        model, remainder = encode(main, dtype or HALF)
        state = _states(numel, start, step, dtypes, seed)
        places = addresses[3:] if addresses[3] % 8 == 0 else addresses[2:]
        columns = {
            "main": (operands.remainder, remainder, addresses[0]) if held else (operands.main, main, addresses[0]),
            "grad": (grads, gradient.to(grad), addresses[2]),
        }
        columns |= {
            name: (operands.state[name], state[name], places[index] if index < 3 and index < len(dtypes) else 0)
            for index, name in enumerate(names)
        }
        if dtype is not None:
            columns["model"] = operands.model, model, addresses[1]
        for column, value, address in columns.values():
            view, buffer = at_address(value.to(DEVICE), address // value.itemsize * value.itemsize)
            column.append(view)
            buffers.append(buffer)
        if dtype is None:
            operands.model.append(operands.main[-1])
        if held:
            hollow = torch.empty(numel, device=DEVICE)
            hollow.untyped_storage().resize_(0)
            operands.main.append(hollow)
        operands.start.append(start)
        operands.step.append(torch.full((), float(step), device=DEVICE))
    return operands, buffers


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(), held=st.booleans(), skips=st.lists(st.sampled_from([False, False, True]), min_size=2, max_size=2)
)
def test_codes_at_any_address_and_length(rule: str, data: st.DataObject, held: bool, skips: list[bool]) -> None:
    """Codes, scales, params, remainders, steps and flags are the reference's; no bit beside them changes.

    Of shards, whose first element is far into the parameter, too; whether moments are codes alone or together.
    """
    rows = data.draw(st.lists(_rows(held), min_size=1, max_size=3))
    update, dtypes = RULES[rule]
    (ours, our_buffers), (theirs, their_buffers) = (_operands(rows, dtypes, held) for _ in range(2))
    backend = TritonBackend()
    for skip in skips:
        expected = update(ReferenceBackend(), theirs, decision_of(skip))
        assert torch.equal(update(backend, ours, decision_of(skip)), expected)
    ours_beside, theirs_beside = (each.step for each in (ours, theirs))
    for left, right in zip([*our_buffers, *ours_beside], [*their_buffers, *theirs_beside], strict=True):
        assert bits_equal(left, right)


@pytest.mark.native
@pytest.mark.parametrize("nan", [0x7FFFFFFF, -1, 0x7F800001])
def test_moments_that_overflow_are_held_as_specified(nan: int) -> None:
    """Gradients whose squares are beyond fp32, or below it: roots of inf, groups of zeros, subnormal numbers, a NaN."""
    update, dtypes = RULES["adamw"]
    rows: list[Row] = [(CHUNK + 40, 0, 3, SINGLE, None, [0] * 6)]
    made = []
    backends: list[Backend] = [ReferenceBackend(), TritonBackend()]
    if DEVICE.type == "cpu":
        backends.append(NativeBackend())
    for backend in backends:
        operands, _ = _operands(rows, dtypes, False)
        grad = operands.grad[0]
        grad[:4], grad[32:40], grad[64:] = 1e30, 1e-30, 1e-22
        grad[70] = torch.tensor(nan, dtype=torch.int32).view(SINGLE)
        for tensors in operands.state.values():
            tensors[0].zero_()
        flags = update(backend, operands, decision_of())
        states = [tensors[0].nan_to_num(7.0) for tensors in operands.state.values()]
        made.append([flags, operands.main[0].nan_to_num(7.0), *states])
    assert all(bits_equal(one, other) for one, *others in zip(*made, strict=True) for other in others)


@pytest.mark.parametrize("held", [False, True])
def test_rows_that_no_kernel_takes_run_on_the_reference(held: bool) -> None:
    """Codes and scales with gaps, and a gradient of fp64: beside others, in one call."""
    update, dtypes = RULES["adamw"]
    rows: list[Row] = [(96, 32, 3, HALF, HALF, [0] * 6)] * 4
    (ours, _), (theirs, _) = (_operands(rows, dtypes, held) for _ in range(2))
    for operands in (ours, theirs):
        state = operands.state
        grads = list(operands.grad)
        for row, column in ((1, state["exp_avg"]), (2, state["exp_avg_sq" + SCALE_SUFFIX])):
            column[row] = torch.stack([column[row], column[row]], -1)[..., 0]
        grads[3] = grads[3].double()
        operands.grad = grads
    flags = update(TritonBackend(), ours, decision_of())
    assert torch.equal(flags, update(ReferenceBackend(), theirs, decision_of()))
    assert not torch.equal(ours.state["exp_avg"][2], _operands(rows, dtypes, held)[0].state["exp_avg"][2])
    for name in ours.state:
        assert all(map(bits_equal, ours.state[name], theirs.state[name]))
    assert all(map(bits_equal, ours.model, theirs.model))
    assert all(map(bits_equal, ours.remainder, theirs.remainder))
