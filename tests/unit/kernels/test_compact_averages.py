"""The codes of 8-bit averages, against exact arithmetic."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from megascale.kernels.compact_averages import decode_average, encode_average
from megascale.kernels.compact_moments import dither

VALUES = st.one_of(
    st.just(0.0),
    st.floats(-(2.0**40), 2.0**40, width=32),
    st.floats(-1.0, 1.0, width=32),
    st.floats(-(2.0**-101), 2.0**-101, width=32),
)


@settings(max_examples=60)
@given(st.lists(VALUES, min_size=1, max_size=70), st.integers(0, 2**32 - 1))
def test_an_average_becomes_a_neighbouring_code(values: list[float], seed: int) -> None:
    """The largest of a group is held exactly. All become the code below or above; which one, the dither decides."""
    dithers = [(seed * (index + 1)) % 2**32 for index in range(len(values))]
    codes, scale = encode_average(torch.tensor(values, dtype=torch.float32), torch.tensor(dithers))
    held = decode_average(codes, scale)
    assert (codes.dtype, scale.dtype, len(scale)) == (torch.int8, torch.float32, -(-len(values) // 32))
    for group, start in enumerate(range(0, len(values), 32)):
        part = slice(start, start + 32)
        largest = max(map(abs, values[part]))
        assert scale[group].item() == (largest if largest >= 2.0**-100 else 0)
        for value, code, at, decoded in zip(
            values[part], codes[part].tolist(), dithers[part], held[part].tolist(), strict=True
        ):
            if scale[group] == 0:
                assert (code, decoded) == (0, 0)
                continue
            assert code == 0 or (code > 0) == (value > 0)
            if abs(value) == largest:
                assert decoded == value
            ratio = Fraction(abs(value)) / Fraction(largest)
            levels = [Fraction(max(abs(code) + step, 0), 127) ** 4 for step in (-1, 0, 1)]
            slack = Fraction(1, 2**20) * levels[2]
            assert levels[0] - slack <= ratio <= levels[2] + slack
            # Above the level: it was rounded down, so that the dither was not exceeded. Below: rounded up.
            passed = Fraction(at, 2**32)
            if ratio > levels[1] + slack:
                assert (ratio - levels[1]) / (levels[2] - levels[1]) <= passed + Fraction(1, 2**10)
            if ratio < levels[1] - slack:
                assert (ratio - levels[0]) / (levels[1] - levels[0]) >= passed - Fraction(1, 2**10)


def test_an_average_is_held_right_on_average() -> None:
    """Over 4,096 steps the mean of what is held is the value, for sizes over five decades and both signs."""
    values = torch.tensor([(-1) ** k * 10 ** (-5 * k / 31) for k in range(32)])
    steps = [decode_average(*encode_average(values, dither(0, 32, torch.tensor(float(t))))) for t in range(4096)]
    mean = torch.stack(steps).double().mean(0)
    step = (4 * values.abs() ** 0.75 / 127).clamp(min=127.0**-4)  # the distance of neighbouring codes
    assert ((mean - values).abs() < step / 100).all()
    assert bool((steps[0] != values).any())


def test_an_average_that_is_not_finite_spoils_its_group_alone() -> None:
    """Its 32 elements become NaN, so that it is noticed; other groups are as they were."""
    for bad in (math.inf, -math.inf, math.nan):
        values = torch.ones(64)
        values[3] = bad
        held = decode_average(*encode_average(values, torch.zeros(64, dtype=torch.int64)))
        assert held[:32].isnan().all()
        assert (held[32:] == 1).all()


def test_what_is_held_is_held_again() -> None:
    """Decoded averages are encoded as the same codes at nearly every step: the state does not wander."""
    values = torch.randn(320, generator=torch.Generator().manual_seed(0))
    codes, scale = encode_average(values, dither(0, 320, torch.tensor(1.0)))
    for step in range(2, 20):
        again, same = encode_average(decode_average(codes, scale), dither(0, 320, torch.tensor(float(step))))
        assert torch.equal(same, scale)
        assert (again == codes).float().mean() > 0.97


def test_the_least_average_is_held() -> None:
    """A group whose largest magnitude is 2**-100 has a scale; one whose largest is smaller is held as zeros."""
    least = torch.full((32,), -(2.0**-100))
    smaller = torch.nextafter(least, torch.zeros(32))
    codes, scale = encode_average(torch.cat([least, smaller, -smaller, least * 0]), torch.zeros(128, dtype=torch.int64))
    assert codes.tolist() == [-127] * 32 + [0] * 96
    assert scale.tolist() == [2.0**-100, 0.0, 0.0, 0.0]
