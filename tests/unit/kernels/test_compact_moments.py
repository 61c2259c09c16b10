"""The codes of 8-bit moments, against an oracle that reads and builds fp32 bit patterns one number at a time."""

import math
import struct
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megascale.kernels.compact_moments import (
    GROUP,
    decode_quotient,
    decode_root,
    dither,
    encode_quotient,
    encode_root,
)

ROOTS = st.one_of(
    st.just(0.0),
    st.floats(2.0**-74, 2.0**64, width=32),
    st.floats(0.5, 8.0, width=32),
    st.sampled_from([math.inf, math.nan]),
)

FIRSTS = st.one_of(st.just(0.0), st.floats(-(2.0**30), 2.0**30, width=32))
SECONDS = st.one_of(st.just(0.0), st.floats(2.0**-40, 2.0**20, width=32))


def bits_of(value: float) -> int:
    """Return an fp32 number's bit pattern."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def number_of(bits: int) -> float:
    """Return the fp32 number of a bit pattern."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def fp32(values: list[float]) -> Tensor:
    """Return an fp32 tensor."""
    return torch.tensor(values, dtype=torch.float32)


def oracle(roots: list[float], dithers: list[int]) -> tuple[list[int], float]:
    """Return the codes and the scale of one group of roots."""
    patterns = [bits_of(root) & 0x7FFFFFFF for root in roots]
    high, low = max(patterns), min(patterns)
    shift = next(s for s in (16, 17, 18, 19) if s == 19 or high // 2**s - low // 2**s < 255)
    lowest = max(high // 2**shift - 254, 0)
    raised = [(bits + each // 2 ** (32 - shift)) // 2**shift for bits, each in zip(patterns, dithers, strict=True)]
    return [max(code - lowest, 0) for code in raised], number_of(lowest * 2**shift + shift - 16)


@settings(max_examples=30)
@given(st.lists(ROOTS, min_size=1, max_size=70), st.integers(0, 2**32 - 1))
def test_roots_are_codes_of_their_bit_patterns(roots: list[float], seed: int) -> None:
    """Codes and scales are the oracle's; codes stand for floor plus code times 2**shift; no root but 0 becomes 0."""
    dithers = [(seed * (index + 1)) % 2**32 for index in range(len(roots))]
    codes, scale = encode_root(fp32(roots), torch.tensor(dithers))
    held = decode_root(codes, scale)
    assert codes.dtype == torch.uint8
    for group, start in enumerate(range(0, len(roots), 32)):
        part = slice(start, start + 32)
        expected, scaled = oracle(roots[part], dithers[part])
        assert codes[part].tolist() == expected
        assert bits_of(scale[group].item()) == bits_of(scaled)
        floor, shift = bits_of(scaled) & ~3, 16 + (bits_of(scaled) & 3)
        assert [bits_of(value) for value in held[part].tolist()] == [floor + (code << shift) for code in expected]
        if max(roots[part]) > 0:
            assert all(held[part] != 0)


def dither_of(index: int, step: int) -> int:
    """Return the dither by the formula of docs/numerics.md."""
    mixed = step // 16 * 0x9E3779B1 % 2**32
    mixed = (mixed ^ mixed // 2**15) * 0x85EBCA77 % 2**32
    return (index * 0x9E3779B1 + step * 0x85EBCA77 + (mixed ^ mixed // 2**13)) % 2**32


def dithered(quotient: float, inverse: float, dither: int) -> int:
    """Return the code of a quotient: the nearest integer to its multiple, in fp32, plus a part of a code."""
    part = np.float32((dither // 8 % 2**13 + 0.5) / 2**13 - 0.5)
    code = np.float32(quotient) * np.float32(inverse) + part
    return int(np.rint(code)) if np.isfinite(code) else 0


@settings(max_examples=30)
@given(st.lists(st.tuples(FIRSTS, SECONDS), min_size=1, max_size=70), st.integers(0, 2**32 - 1))
def test_quotients_are_rounded_to_one_of_255(pairs: list[tuple[float, float]], seed: int) -> None:
    """Codes are the oracle's, less than a code from the exact quotient; what has root 0 is held as 0."""
    firsts, roots = ([pair[index] for pair in pairs] for index in (0, 1))
    dithers = [(seed * (index + 1)) % 2**32 for index in range(len(pairs))]
    codes, scale = encode_quotient(fp32(firsts), fp32(roots), torch.tensor(dithers))
    held = decode_quotient(codes, scale, fp32(roots))
    exact = [
        Fraction(float(np.float32(first) / np.float32(root))) if root else Fraction(0)
        for first, root in zip(firsts, roots, strict=True)
    ]
    for group, start in enumerate(range(0, len(pairs), 32)):
        part = slice(start, start + 32)
        step = Fraction(scale[group].item())
        inverse = float(np.float32(1) / np.float32(step)) if step else 0.0
        for code, quotient, each in zip(codes[part].tolist(), exact[part], dithers[part], strict=True):
            assert code == dithered(float(quotient), inverse, each)
            assert -127 <= code <= 127
            if step:
                assert abs(code - quotient / step) < 1
            else:
                assert abs(quotient) < Fraction(1, 2**99)
                assert code == 0
    for code, root, value in zip(codes.tolist(), roots, held.tolist(), strict=True):
        assert (value == 0) or (code and root)


@settings(max_examples=300)
@given(st.floats(2.0**-90, 2.0**90, width=32), st.sampled_from([0, 2**32 - 1, 0xFFF8, 7]))
def test_the_largest_quotient_of_a_group_is_code_127(largest: float, each: int) -> None:
    """With the largest dither and the least: no code is 128, which int8 has not. 0 is code 0."""
    firsts = fp32([largest, -largest, 0.0, largest / 254])
    codes, _ = encode_quotient(firsts, torch.ones(4), torch.full((4,), each))
    assert codes.tolist()[:3] == [127, -127, 0]
    assert codes.tolist()[3] in (0, 1)


@pytest.mark.slow
def test_quotients_between_two_codes_are_held_right_on_average() -> None:
    """Over 4,096 steps the mean of what is held is within 0.02 codes; the nearest code is off by a third."""
    quotients = fp32([127.0, *(code + 1 / 3 for code in range(-15, 16))])
    held = []
    for step in range(4096):
        codes, scale = encode_quotient(quotients, torch.ones(GROUP), dither(0, GROUP, torch.tensor(float(step))))
        held.append(decode_quotient(codes, scale, torch.ones(GROUP)))
    assert ((torch.stack(held).double().mean(0) - quotients).abs() < 0.02).all()


def test_the_least_quotient_is_held() -> None:
    """A group whose largest quotient is 2**-100 has a scale; one whose largest is smaller is held as zeros."""
    least = torch.full((GROUP,), 2.0**-100)
    smaller = torch.nextafter(least, torch.zeros(GROUP))
    quotients = torch.cat([least, smaller, -smaller, least * 0])
    codes, scale = encode_quotient(quotients, torch.ones(4 * GROUP), dither(0, 4 * GROUP, torch.tensor(1.0)))
    assert codes.tolist() == [127] * GROUP + [0] * 3 * GROUP
    assert scale.tolist() == [float(torch.tensor(2.0**-100) / 127), 0.0, 0.0, 0.0]


def test_a_first_moment_that_is_not_finite_spoils_its_group_alone() -> None:
    """Its 32 elements become NaN, so that it is noticed; other groups are as they were."""
    for bad in (math.inf, math.nan):
        first = torch.ones(64)
        first[3] = bad
        codes, scale = encode_quotient(first, torch.ones(64), dither(0, 64, torch.tensor(1.0)))
        held = decode_quotient(codes, scale, torch.ones(64))
        assert held[:32].isnan().all()
        assert (held[32:] == 1).all()


def test_any_nan_makes_the_same_codes() -> None:
    """Which NaN a processor computes is nobody's promise: its bits would move the codes of its neighbours."""
    made = []
    for bits in (0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001):
        roots = torch.rand(40, generator=torch.Generator().manual_seed(0))
        roots[5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        made.append(encode_root(roots, dither(0, 40, torch.tensor(1.0))))
        assert decode_root(*made[-1]).isnan().tolist() == [index == 5 for index in range(40)]
    assert all(torch.equal(one, other) for one, *others in zip(*made, strict=True) for other in others)


def test_dither_depends_on_element_and_step_alone() -> None:
    """A range of elements has the same dither wherever it is cut; the formula is modulo 2**32."""
    step = torch.tensor(7.0)
    whole = dither(0, 256, step)
    assert torch.equal(dither(96, 64, step), whole[96:160])
    assert whole.tolist() == [dither_of(index, 7) for index in range(256)]
    for far, late in ((5_000_000_000, 7), (3, 2**31), (2**33 + 1, 2**40)):
        assert dither(far, 1, torch.tensor(float(late))).item() == dither_of(far, late)


@pytest.mark.slow
def test_a_root_between_two_codes_is_held_right_on_average() -> None:
    """Over 4,096 steps the mean of what is held is the root within 0.02 codes; the nearest code is off by a third."""
    root = fp32([1.0 + 2.0**-7 / 3] * 32)
    held = torch.stack([decode_root(*encode_root(root, dither(0, 32, torch.tensor(float(t))))) for t in range(4096)])
    assert ((held.double().mean(0) - root).abs() < 2.0**-7 * 0.02).all()


def test_codes_that_were_set_to_zero_stand_for_zeros() -> None:
    """A group of zero codes, as ``exp_avg_sq.zero_()`` leaves it beside its scale; no group of other roots has such
    codes, however far apart they are.
    """
    generator = torch.Generator().manual_seed(0)
    for spread in (0.0, 1.0, 8.0, 60.0):
        roots = torch.exp2(spread * torch.rand(320, generator=generator) - spread / 2)
        codes, scale = encode_root(roots, dither(0, 320, torch.tensor(1.0)))
        assert (codes.view(-1, GROUP).amax(1) >= 254).all()
        before = decode_root(codes, scale)
        codes[32:64], codes[300:] = 0, 0
        after = decode_root(codes, scale)
        assert not after[32:64].any()
        assert torch.equal(after[:32], before[:32])
        assert torch.equal(after[64:300], before[64:300])
        assert (after[300:] > 0).all()  # beside codes that are not 0, the lowest is the floor
