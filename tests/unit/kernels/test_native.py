"""The native backend: the reference's bits, for every type, layout and number of threads."""

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megascale.kernels import (
    AdamHyper,
    Decision,
    LionHyper,
    NativeBackend,
    Operands,
    ReferenceBackend,
    SgdHyper,
)
from megascale.kernels.native import backend as native_backend
from megascale.kernels.native import levels, library
from tests.training import bits_equal
from tests.unit.kernels.test_remainders import edge_pairs

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EVERY = levels.supported() or ["baseline"]
VECTORS = [EVERY[0], *(pytest.param(level, marks=pytest.mark.slow) for level in EVERY[1:])]
SIZES = st.lists(st.sampled_from([0, 1, 3, 16, 31, 511, 512, 513, 1025, 70_000]), min_size=1, max_size=5)


def _decision(found_inf: float = 0.0, coefficient: float = 2.0**-10) -> Decision:
    return Decision(torch.tensor(found_inf), torch.tensor(coefficient), torch.tensor(1.0), torch.tensor(0.0))


def _operands(
    sizes: list[int],
    grad: torch.dtype,
    model: torch.dtype,
    states: dict[str, torch.dtype],
    seed: int = 0,
    offset: int = 0,
    *,
    counted: bool = False,
) -> Operands:
    """Tensors at odd addresses: each is a view that begins ``offset`` elements into its storage."""
    generator = torch.Generator().manual_seed(seed)

    def made(size: int, dtype: torch.dtype, scale: float) -> Tensor:
        return (torch.randn(size + offset, generator=generator) * scale).to(dtype)[offset:]

    mains = [made(size, torch.float32, 0.1) for size in sizes]
    return Operands(
        model=mains if model == torch.float32 else [main.to(model) for main in mains],
        main=mains,
        grad=[made(size, grad, 30.0) for size in sizes],
        state={
            name: [made(size, dtype, 1e-2).abs_() if name.endswith("sq") else made(size, dtype, 1e-2) for size in sizes]
            for name, dtype in states.items()
        },
        step=[torch.tensor(float(index * 7)) for index in range(len(sizes))] if counted else [],
    )


@pytest.fixture(scope="module")
def native(request: pytest.FixtureRequest) -> NativeBackend:
    """The backend, with the library of a level."""
    if request.param not in levels.supported() or not levels.path(request.param).exists():
        pytest.skip(f"{request.param}: not of this CPU, or not built, as on a machine of .ci/machines without it")
    backend = NativeBackend()
    backend._library = library.load(levels.path(request.param))
    return backend


def _tensors(operands: Operands) -> list[Tensor]:
    return [*operands.main, *operands.model, *operands.step, *(t for column in operands.state.values() for t in column)]


def _same(ours: Operands, theirs: Operands) -> bool:
    return all(bits_equal(a, b) for a, b in zip(_tensors(ours), _tensors(theirs), strict=True))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


HYPERS = [
    AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, False),
    AdamHyper(1e-2, 0.9, 0.95, 1e-6, 0.1, False, True, True),
    AdamHyper(1e-2, 0.9, 0.999, 0.0, 0.0, False, False, False),
    AdamHyper(1e-2, 0.9, 0.999, 1e-8, 1.0, False, False, False),
    SgdHyper(1e-2, 0.0, 0.0, 0.1, False, False),
    SgdHyper(1e-2, 1.0, 1.0, 1.0, False, False),
    SgdHyper(1e-2, 0.9, 0.0, 0.1, True, False),
    SgdHyper(1e-2, 0.9, 0.3, 0.0, False, True),
    LionHyper(1e-2, 0.9, 0.99, 0.1, False),
]


def _run(backend: NativeBackend | ReferenceBackend, operands: Operands, hyper: object, decision: Decision) -> Tensor:
    if isinstance(hyper, AdamHyper):
        return backend.adam_(operands, hyper, decision)
    if isinstance(hyper, SgdHyper):
        return backend.sgd_(operands, hyper, decision)
    assert isinstance(hyper, LionHyper)
    return backend.lion_(operands, hyper, decision)


@pytest.mark.native
@pytest.mark.parametrize("native", VECTORS, indirect=True)
@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    grad=st.sampled_from(DTYPES),
    model=st.sampled_from(DTYPES),
    moments=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    hyper=st.sampled_from(HYPERS),
    skipped=st.booleans(),
    threads=st.sampled_from([1, 2, 3, 16]),
    offset=st.sampled_from([0, 1, 16]),
)
def test_bits_are_those_of_the_reference(
    native: NativeBackend,
    sizes: list[int],
    grad: torch.dtype,
    model: torch.dtype,
    moments: tuple[torch.dtype, torch.dtype],
    hyper: AdamHyper | SgdHyper | LionHyper,
    skipped: bool,
    threads: int,
    offset: int,
) -> None:
    """Invariant 3: three steps, one perhaps skipped, give the same bits in main and model params, moments and step
    counts, and the same flags, whatever the types, lengths, addresses, threads and vectors.
    """
    names = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "max_exp_avg_sq": moments[1]}
    if isinstance(hyper, SgdHyper):
        names = {"momentum_buffer": moments[0]} if hyper.momentum else {}
    elif isinstance(hyper, LionHyper):
        names = {"exp_avg": moments[0]}
    elif not hyper.amsgrad:
        del names["max_exp_avg_sq"]
    counted = isinstance(hyper, AdamHyper) or (isinstance(hyper, SgdHyper) and hyper.dampening != 0)
    ours, theirs = (_operands(sizes, grad, model, names, len(sizes), offset, counted=counted) for _ in range(2))
    reference = ReferenceBackend()
    for step in range(3):
        decision = _decision(found_inf=1.0 if skipped and step == 1 else 0.0)
        with _threads(threads):
            flags = _run(native, ours, hyper, decision)
        assert torch.equal(flags, _run(reference, theirs, hyper, decision))
        assert _same(ours, theirs)


def _halves() -> Tensor:
    """All 65,536 patterns, int16."""
    return torch.arange(-32768, 32768, dtype=torch.int16)


def _widened(halves: Tensor) -> Tensor:
    """Return the fp32 bits of 16-bit numbers: torch's, with NaNs quiet and their sign and payload kept."""
    bits, pattern = halves.float().view(torch.int32), halves.view(torch.int16).int() & 0xFFFF
    shift = 13 if halves.dtype == torch.float16 else 16
    payload = (pattern & (1023 if shift == 13 else 127)) << shift
    return torch.where(halves.isnan(), (pattern >> 15 << 31) | 0x7FC00000 | payload, bits)


def _narrowed(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of fp32 numbers in 16 bit: torch's; fp16 NaNs keep sign and payload, quiet, bf16 has one NaN."""
    bits = numbers.view(torch.int32)
    sign, payload = (bits >> 16) & 0x8000, (bits >> 13) & 0x3FF
    nan = sign | 0x7E00 | payload if dtype == torch.float16 else torch.full_like(bits, 0x7FC0)
    return torch.where(numbers.isnan(), nan.to(torch.int16), numbers.to(dtype).view(torch.int16))


def _check_conversions(native: NativeBackend, dtype: torch.dtype, numbers: Tensor) -> None:
    """Compare conversions in rows too short for vectors and in long ones; gradients widen, main params are rounded."""
    widened, halves, narrowed = _widened(_halves().view(dtype)), _halves().view(dtype), _narrowed(numbers, dtype)
    one = _decision(0.0, 1.0)
    for rows in ([halves], list(halves.split(7))):
        mains = [torch.zeros(len(row)) for row in rows]
        native.sgd_(Operands(mains, mains, rows), SgdHyper(-1.0, 0.0, 0.0, 0.0, False, False), one)
        found = torch.cat(mains).view(torch.int32)
        assert torch.equal(found, torch.where(widened == -(2**31), 0, widened))  # 0 - -1 * -0 is +0
    for mains in ([numbers], list(numbers[: 2**16].split(7))):
        models = [torch.empty(len(main), dtype=dtype) for main in mains]
        native.write_back_(Operands(models, mains))
        found = torch.cat(models).view(torch.int16)
        assert torch.equal(found, narrowed[: len(found)])


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("native", EVERY, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_is_widened_and_rounded_right(dtype: torch.dtype, native: NativeBackend) -> None:
    """All 65,536 patterns, and fp32 numbers on, between and beside 16-bit numbers, and a million random ones: every
    bit, a NaN's too, is the same at all levels. torch's conversions are the oracle.
    """
    bits = _halves().view(dtype).float().view(torch.int32)
    shifts = (-1, 0, 1, 1 << 11, 1 << 12, (1 << 12) + 1, 1 << 15, (1 << 15) + 1)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).to(torch.int32)
    numbers = torch.cat([*(bits + shift for shift in shifts), random])[torch.randperm(1_524_288, generator=generator)]
    _check_conversions(native, dtype, numbers.view(torch.float32))


@pytest.mark.native
@pytest.mark.parametrize("native", VECTORS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_the_same_bits_for_any_threads_and_vectors(dtype: torch.dtype, native: NativeBackend) -> None:
    """Invariant 14: sums are added in one order, of chunks that do not depend on the threads; counts are exact."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=generator).to(dtype) for size in (200_000, 0, 65_537, 3, 1055)]
    grads[0][::7] = 0
    grads[4][-2:] = torch.tensor([math.nan, -math.inf])
    expected = NativeBackend().measure(grads, count_zeros=True)
    assert expected.zeros is not None
    assert expected.zeros.tolist() == [int((grad == 0).sum()) for grad in grads]
    assert expected.non_finite.tolist() == [0, 0, 0, 0, 2]
    for threads in (1, 2, 3):
        with _threads(threads):
            found = native.measure(grads, count_zeros=True)
        assert bits_equal(found.sum_squares[:4], expected.sum_squares[:4])
        assert torch.equal(found.non_finite, expected.non_finite)
        assert found.zeros is not None
        assert torch.equal(found.zeros, expected.zeros)


@pytest.mark.default("model0-0-*")
@pytest.mark.native
@pytest.mark.parametrize("native", VECTORS, indirect=True)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("model", [torch.float16, torch.bfloat16])
def test_large_updates_leave_the_same_bits(model: torch.dtype, offset: int, native: NativeBackend) -> None:
    """Whole cache lines of large updates' model params are written past the caches: the same values arrive."""
    states = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    ours, theirs = (_operands([4_200_013, 77], model, model, states, 0, counted=True) for _ in range(2))
    for operands in (ours, theirs):
        operands.model[0] = torch.empty(4_200_013 + offset, dtype=model)[offset:].copy_(operands.model[0])
    hyper = AdamHyper(1e-2, 0.9, 0.999, 1e-8, 0.1, True, False, False)
    with _threads(2):
        native.adam_(ours, hyper, _decision())
    ReferenceBackend().adam_(theirs, hyper, _decision())
    assert _same(ours, theirs)


@pytest.mark.native
@pytest.mark.parametrize("codes", [False, True], ids=["fp32 moments", "codes"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("native", VECTORS, indirect=True)
def test_pairs_that_no_encoding_produces(dtype: torch.dtype, codes: bool, native: NativeBackend) -> None:
    """Model params beside remainders that others' writes left, in an update of rate 0: as by the reference, in whole
    vectors and in what is left of them; with codes, beside second moments that were set to 0.
    """
    model, remainder = edge_pairs(dtype, 7)
    there = ~model.isnan()
    ends = [1, 18, 37, 600, 70_000]
    pairs = [(model, remainder), *((model[there][-end:], remainder[there][-end:]) for end in ends)]
    models, lefts = ([pair[at] for pair in pairs] for at in (0, 1))

    def operands() -> Operands:
        copies = [one.clone() for one in models[1:]]
        moments = {
            name: [torch.ones_like(one, dtype=kind if codes else torch.float32) for one in copies]
            for name, kind in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8))
        }
        scales = {name + "_scale": [torch.ones(-(-len(one) // 32)) for one in copies] for name in moments if codes}
        for moment in moments["exp_avg_sq"]:
            moment[:64] = 0  # as after zero_(): beside scales of other codes
        return Operands(
            model=copies,
            main=[torch.empty_like(one, device="meta", dtype=torch.float32) for one in copies],
            grad=[torch.ones_like(one) for one in copies],
            state=moments | scales,
            step=[torch.zeros(()) for _ in copies],
            remainder=[one.clone() for one in lefts[1:]],
        )

    ours, theirs, still = operands(), operands(), AdamHyper(0.0, 0.9, 0.999, 1e-8, 0.0, True, False, False)
    flags, expected = (
        backend.adam_(each, still, _decision()) for backend, each in ((native, ours), (ReferenceBackend(), theirs))
    )
    assert torch.equal(flags, expected)
    assert all(map(bits_equal, ours.model, theirs.model))
    assert all(map(bits_equal, ours.remainder, theirs.remainder))
    for name, column in ours.state.items():
        assert all(map(bits_equal, column, theirs.state[name]))


def test_row_has_the_layout_of_native_c() -> None:
    """The columns of the table are the fields of native.c's Row: 11 of 8 bytes."""
    assert native_backend.COLUMNS * 8 == 88
    assert ctypes.sizeof(native_backend._Lengths) == 4 * 8
    assert ctypes.sizeof(native_backend._Grads) == 2 * 8
    assert ctypes.sizeof(native_backend._Hyper) == 11 * 8
    assert ctypes.sizeof(native_backend._ScaleRule) == 8 * 8
    assert f"#define CHUNK {native_backend.CHUNK} " in levels.HEADERS
