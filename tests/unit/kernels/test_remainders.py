"""Main params as a 16-bit model param and a 16-bit remainder: the format."""

import pytest
import torch
from torch import Tensor

from megascale.kernels import Operands, ReferenceBackend, remainders, rounding, select_backend
from tests.training import bits_equal

CHUNK = 1 << 22
FORMATS = (torch.float16, torch.bfloat16)


def _bits(value: Tensor) -> Tensor:
    return value.view(torch.int32)


def _moved(main: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Check what holds of every number; return those that are not decoded exactly, and what they become."""
    model, remainder = remainders.encode(main, dtype)
    decoded = remainders.decode(model, remainder)
    nan = main.isnan()
    assert bool((decoded.isnan() == nan).all())
    assert not bool(remainder[nan].any())
    held = ~nan & (~model.isinf() if dtype == torch.float16 else True)
    assert bool((decoded.to(dtype).view(torch.int16) == model.view(torch.int16))[~nan].all())
    again = remainders.encode(decoded, dtype)
    assert torch.equal(again[1][held], remainder[held])
    assert bool((decoded.signbit() == main.signbit())[~nan].all())
    moved = held & (_bits(decoded) != _bits(main))
    return main[moved], decoded[moved]


def _check_bf16(main: Tensor) -> int:
    before, after = _moved(main, torch.bfloat16)
    assert bool((_bits(before) & 0x1FFFF == 0x8000).all())  # ties whose upper half is even
    assert bool((_bits(before) - _bits(after) == 1).all())
    return before.numel()


def _check_fp16(main: Tensor) -> None:
    before, after = _moved(main, torch.float16)
    assert bool((before.abs() < 2.0**-16).all())
    error = (before.double() - after.double()).abs()
    tie = before.abs().double().mul(2.0**40).add(0.5).floor().to(torch.int64) % (1 << 16) == 1 << 15
    assert bool((error <= torch.where(tie, 2.0**-40, 2.0**-41)).all())


def _every(step: int) -> Tensor:
    return torch.arange(-(1 << 31), 1 << 31, step).to(torch.int32).view(torch.float32)


def test_a_sample_of_all_numbers_is_held() -> None:
    """One of 4,099 bit patterns, of both formats."""
    main = _every(4099)
    _check_bf16(main)
    _check_fp16(main)


def test_halfway_numbers_move_by_one_ulp_in_bf16() -> None:
    """32,640 of them, those whose upper half is even."""
    assert _check_bf16(_every(0x8000)) == 32640


def test_halfway_numbers_keep_their_model_param_in_fp16() -> None:
    """All below 2**-16 and their fp32 neighbours, of both signs."""
    tie = (torch.arange(256) + 0.5) * 2.0**-24
    main = torch.cat([tie, tie.nextafter(torch.tensor(1.0)), tie.nextafter(torch.tensor(0.0))])
    _check_fp16(torch.cat([main, -main]))


def edge_pairs(dtype: torch.dtype, step: int = 1) -> tuple[Tensor, Tensor]:
    """Return every ``step``-th model param, and the smallest and largest, beside all remainders at which pairs begin
    that no encoding produces, and their neighbours.
    """
    ends = [end for power in (0, 1 << 12, 1 << 13, 1 << 14, 1 << 15) for end in (power, -power)]
    lefts = sorted({end + more for end in ends for more in (-1, 0, 1) if -(1 << 15) <= end + more < 1 << 15})
    least = [1, 0x100, 0x200, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7F7F, 0x7F80, 0x7F81]
    near = [size + more - sign for size in least for more in (-1, 0) for sign in (0, 1 << 15)]
    half = torch.cat([torch.arange(-(1 << 15), 1 << 15, step), torch.tensor(near)]).to(torch.int16)
    return half.repeat_interleave(len(lefts)).view(dtype), torch.tensor(lefts, dtype=torch.int16).repeat(len(half))


def _check_pairs(model: Tensor, remainder: Tensor) -> int:
    """Check what holds of every pair; return how many an encoding produces, as :func:`_moved` finds of each number."""
    decoded, nan = remainders.decode(model, remainder), model.isnan()
    assert torch.equal(decoded.isnan(), nan)
    again, left = remainders.encode(decoded, model.dtype)
    assert torch.equal(again.view(torch.int16)[~nan], model.view(torch.int16)[~nan])
    foreign = ~nan & (left != remainder)
    assert torch.equal(_bits(decoded[foreign]), _bits(model[foreign].float()))
    return int((~foreign & ~nan).sum())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_sample_of_all_pairs_is_decoded(dtype: torch.dtype) -> None:
    """Every model param with some remainders: the decoded number rounds to it, and is it where they do not fit."""
    model, remainder = edge_pairs(dtype)
    assert 0 < _check_pairs(model, remainder) < model.numel()


@pytest.mark.release
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_all_pairs_are_decoded(dtype: torch.dtype) -> None:
    """All 2**32 pairs of a model param and a remainder."""
    lefts = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for start in range(-(1 << 15), 1 << 15, 64):
        half = torch.arange(start, start + 64).to(torch.int16)
        _check_pairs(half.repeat_interleave(len(lefts)).view(dtype), lefts.repeat(len(half)))


@pytest.mark.release
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_numbers_are_held(dtype: torch.dtype) -> None:
    """All 2**32 bit patterns."""
    moved = 0
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        main = torch.arange(start, start + CHUNK).to(torch.int32).view(torch.float32)
        if dtype == torch.bfloat16:
            moved += _check_bf16(main)
        else:
            _check_fp16(main)
    assert dtype == torch.float16 or moved == 32640


def test_an_infinite_model_param_stays_infinite() -> None:
    """In fp16, whatever the main param was."""
    main = torch.tensor([65520.0, 1e6, -1e9, torch.inf, -torch.inf])
    decoded = remainders.decode(*remainders.encode(main, torch.float16))
    assert decoded.tolist() == [torch.inf, torch.inf, -torch.inf, torch.inf, -torch.inf]


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("numbers", [1, 2, 3])
def test_what_does_not_fit_fp16_is_told_and_kept(backend: str, numbers: int) -> None:
    """Of neighbours that are encoded together, one to three of each dtype: a finite element from 65520 on keeps its
    model param, inf and NaN arrive, each parameter has a flag of its own, and a skipped step writes and tells nothing.
    """
    mains = [torch.tensor([values, [1.0, 2.0]]) for values in ([65520.0, 3.0], [65519.0, 3.0], [-torch.inf, 3.0])]
    dtypes = [torch.float16] * numbers + [torch.bfloat16] * numbers + [torch.float16]
    mains = [main.clone() for main in [*mains[:numbers], *mains[:numbers], mains[1]]]
    models = [torch.full_like(main, 5.0, dtype=dtype) for main, dtype in zip(mains, dtypes, strict=True)]
    if numbers == 3:  # and one of them strided
        models[-1] = models[-1].t().contiguous().t()
    lefts = [torch.zeros_like(model, dtype=torch.int16) for model in models]
    held = Operands(model=models, remainder=lefts, main=mains)
    assert not select_backend(backend).encode_(held, torch.ones(())).any()
    assert all(bool((model == 5).all()) for model in models)
    assert not any(remainder.any() for remainder in held.remainder)
    flags = select_backend(backend).encode_(held, torch.zeros(()))
    assert flags.tolist() == [True, False, True][:numbers] + [False] * numbers + [False]
    first = [[5.0, 3.0], [65504.0, 3.0], [-torch.inf, 3.0]][:numbers]
    assert [model[0].tolist() for model in models[:numbers]] == first
    wide = [main[0].bfloat16().tolist() for main in mains[numbers:-1]]
    assert [model[0].tolist() for model in models[numbers:-1]] == wide
    assert models[-1].tolist() == [[65504.0, 3.0], [1.0, 2.0]]
    expected = [main.clone() for main in mains]
    expected[0][0, 0] = 5.0
    for main in mains:
        main.zero_()
    select_backend(backend).decode_(held)
    assert all(torch.equal(one, other) for one, other in zip(mains, expected, strict=True))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_large_parameter_is_decoded_and_encoded_in_slices(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, tensor code took 39 bytes per element of the largest one. The bits are the same, whatever the strides, and
    an overflow in any slice is the parameter's.
    """
    generator, backend = torch.Generator().manual_seed(0), ReferenceBackend()
    mains = [torch.randn(shape, generator=generator) for shape in ((3, 5), (40, 4, 2, 2), (97,), (6, 30), (2, 3))]
    mains[1] = mains[1].contiguous(memory_format=torch.channels_last)
    mains[3] = mains[3].t()
    mains[2][60] = 1e6

    def held() -> tuple[Operands, Tensor]:
        model, remainder = map(list, zip(*(remainders.encode(main, dtype) for main in mains), strict=True))
        operands = Operands(model=model, remainder=remainder, main=list(map(torch.zeros_like, mains)))
        backend.decode_(operands)
        for main, given in zip(operands.main, mains, strict=True):
            main.add_(given)
        return operands, backend.encode_(operands, torch.zeros(()))

    whole, flags = held()
    sizes = []

    def noted(model: Tensor, remainder: Tensor) -> Tensor:
        sizes.append(model.numel())
        return remainders.decode(model, remainder)

    monkeypatch.setattr(rounding, "DECODED_NUMEL", 32)
    monkeypatch.setattr(rounding, "decode", noted)
    sliced, same_flags = held()
    assert sizes == [15, *[32] * 20, *[32, 32, 32, 1], *[30] * 6, 6]
    assert torch.equal(flags, same_flags)
    assert flags.tolist() == [False, False, dtype == torch.float16, False, False]
    for column in ("main", "model", "remainder"):
        assert all(map(bits_equal, getattr(whole, column), getattr(sliced, column)))
