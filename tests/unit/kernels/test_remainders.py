"""Main params as a 16-bit model param and a 16-bit remainder: the format."""

import pytest
import torch
from torch import Tensor

from megascale.kernels import remainders

CHUNK = 1 << 22


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


@pytest.mark.slow
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
