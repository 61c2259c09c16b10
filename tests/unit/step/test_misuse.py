"""What agreed statistics say of a step, on both sides of each bound."""

import math
import re

import pytest
import torch

from megascale.kernels import Statistic
from megascale.step.local_grads import ReplicaSet
from megascale.step.misuse import (
    differing_replicas,
    has_only_zeros,
    have_replicas_parted,
    parted_replicas,
    was_skipped,
)

FP32 = torch.finfo(torch.float32).max


def _statistics(sum_squares: float, non_finite: float = 0.0, contrast: float = 0.0, scaled: float = 1.0) -> list[float]:
    agreed = [0.0] * len(Statistic)
    agreed[Statistic.SUM_SQUARES], agreed[Statistic.NON_FINITE] = sum_squares, non_finite
    agreed[Statistic.CONTRAST], agreed[Statistic.SCALED] = contrast, scaled
    return agreed


@pytest.mark.parametrize(
    ("sum_squares", "non_finite", "expected"),
    [
        (0.0, 0, False),
        (FP32, 0, False),
        (math.nextafter(FP32, math.inf), 0, True),
        (math.inf, 0, True),
        (math.nan, 0, True),
        (1.0, 1, True),
    ],
)
def test_skips_are_those_of_the_decision(sum_squares: float, non_finite: int, expected: bool) -> None:
    """A norm that fp32 cannot hold, or one element that is not finite."""
    assert was_skipped(_statistics(sum_squares, non_finite)) is expected


@pytest.mark.parametrize(
    ("sum_squares", "non_finite", "expected"), [(0.0, 0, True), (0.0, 1, False), (1.0, 0, False), (1e-320, 0, False)]
)
def test_only_zeros_are_zeros(sum_squares: float, non_finite: int, expected: bool) -> None:
    """Elements that are not finite are not summed up, and are no zeros."""
    assert has_only_zeros(_statistics(sum_squares, non_finite)) is expected


@pytest.mark.parametrize("sum_squares", [0.0, 100.0])
def test_gradients_of_replicas_differ_beyond_rounding(sum_squares: float) -> None:
    """By more than a ten-thousandth of the sum of squares, in a step without overflow, of either sign."""
    largest = 1e-4 * sum_squares
    beyond = math.nextafter(largest, math.inf)
    for sign in (1, -1):
        assert not have_replicas_parted(_statistics(sum_squares, contrast=sign * largest))
        assert not have_replicas_parted(_statistics(sum_squares, non_finite=1, contrast=sign * beyond))
        assert have_replicas_parted(_statistics(sum_squares, contrast=sign * beyond))


def test_differing_gradients_are_named_by_who_holds_them() -> None:
    """By more than a ten-thousandth of their own squares; a rank without the parameter is no difference."""
    data, tensor = ("data-parallel", (0, 1), "w"), ("tensor-parallel", (0, 2), "norm")
    every: list[dict[ReplicaSet, float]] = [{data: 1.0, tensor: 1.0}, {data: 1.0 + 1e-5}, {tensor: 1.01}]
    assert differing_replicas(every) == {"tensor-parallel": ["norm"]}
    assert differing_replicas([*every, {data: 1.1}]) == {"tensor-parallel": ["norm"], "data-parallel": ["w"]}
    assert differing_replicas([]) == {}


@pytest.mark.parametrize(
    ("differing", "words"),
    [
        ({}, "different gradients: nobody has reduced them. Wrap"),
        ({"data-parallel": ["w"]}, r"nobody has reduced them \(those of 'w'\). Wrap"),
        ({"tensor-parallel": ["n"], "data-parallel": ["w"]}, r"nobody has reduced them \(those of 'w'\). Wrap"),
        ({"tensor-parallel": ["n"]}, "tensor-parallel ranks .* of 'n'. Under sequence parallelism, all-reduce"),
    ],
)
def test_the_error_says_who_has_to_reduce(differing: dict[str, list[str]], words: str) -> None:
    """Data-parallel ranks first: where nobody has reduced, tensor-parallel ranks differ, too."""
    assert re.search(words, str(parted_replicas(differing)))
