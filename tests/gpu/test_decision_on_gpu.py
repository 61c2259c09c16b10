"""The kernels of the decision and of the loss scale on the device: the bodies of tests/unit, with Triton compiled."""

import random

import pytest

from megascale.kernels import select_backend
from tests.unit.kernels.test_decision import (
    backend,
    test_any_form_of_found_inf,
    test_autograd_hears_that_the_scale_has_changed,
    test_decision_equals_host_numbers,
    test_total_equals_host_numbers,
    test_total_keeps_what_is_not_finite,
)
from tests.unit.test_grad_scaler import follow_schedule

pytestmark = pytest.mark.gpu

__all__ = [
    "backend",
    "test_any_form_of_found_inf",
    "test_autograd_hears_that_the_scale_has_changed",
    "test_decision_equals_host_numbers",
    "test_total_equals_host_numbers",
    "test_total_keeps_what_is_not_finite",
]


def test_rule_equals_oracle_on_random_schedules() -> None:
    """The dynamic rule, both hysteresis modes, by Triton's kernel: no difference from the oracle on 300 schedules."""
    rng, triton = random.Random(0), select_backend("triton")
    for _ in range(300):
        follow_schedule(rng, steps=10, backend=triton)
