"""From agreed statistics to a decision, and from a decision to the next scale: each backend against host numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megascale import DynamicGradScaler
from megascale.kernels import Backend, GradWeights, Statistic, TensorStats, select_backend
from tests.counting import OperatorCounter

BACKENDS = ["reference", "native", "triton"]
# Triton's kernels run on the accelerator, where there is one, and else in its interpreter.
ACCELERATOR = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
FP32 = float(np.finfo(np.float32).max)

counts = st.one_of(st.just(0.0), st.floats(0, 2.0**40))
sums = st.one_of(
    st.floats(0, 1e39), st.sampled_from([0.0, 1e-320, FP32, math.nextafter(FP32, math.inf), math.inf, math.nan])
)
scales = st.one_of(st.none(), st.floats(2.0**-126, 2.0**127, width=32), st.sampled_from([3.0, 65536.0]))
contrasts = st.one_of(st.just(0.0), st.floats(-1e30, 1e30), st.sampled_from([math.inf, math.nan]))
clips = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-12, 1e12))
limits = st.one_of(st.just(math.inf), st.floats(1e-300, 1e300))


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend that decides in its own way; the others inherit the reference's."""
    if request.param == "triton":
        pytest.importorskip("triton")
    return select_backend(request.param)


def _device(backend: Backend) -> torch.device:
    return ACCELERATOR if backend.name == "triton" else torch.device("cpu")


def _scaler(backend: Backend, initial_scale: float) -> DynamicGradScaler:
    scaler = DynamicGradScaler(initial_scale, 1.0, 2.0, 0.5, 1, 1, device=_device(backend))
    scaler.backend = backend
    return scaler


def _oracle(vector: list[float], scale: float | None, clip_grad: float, most_norm: float) -> list[float]:
    """found_inf, coefficient, norm, zeros, overflow, success: numpy's fp64, each result rounded once."""
    sum_squares, non_finite, zeros, errors, contrast, scaled = map(np.float64, vector)
    with np.errstate(all="ignore"):
        found = not sum_squares <= FP32 or non_finite > 0 or errors > 0
        found = found or abs(contrast) > 1e-4 * sum_squares or scaled <= 0
        unscale = np.float64(1.0 if scale is None else np.float32(1 / np.float64(scale)))
        norm = np.sqrt(sum_squares) * unscale
        coefficient = unscale
        if clip_grad > 0:
            clip = np.float64(1) / (norm + 1e-6) * clip_grad
            coefficient = unscale * (clip if not clip > 1 else 1.0)
        skipped = found or np.float32(norm) > np.float32(most_norm)
        rounded = [float(np.float32(coefficient)), float(np.float32(norm)), float(np.rint(zeros))]
        return [float(skipped), *rounded, float(found), not skipped]


@pytest.mark.default("reference")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sums, counts, st.one_of(counts, st.just(math.nan)), counts, contrasts, st.integers(0, 3), scales, clips, limits)
@example(4.0, 0.0, math.nan, 0.0, 0.0, 1, 2.0, 1.0, math.inf)
@example(FP32, 0.0, 2.5, 0.0, 0.0, 1, None, 1.0, math.inf)
@example(1.0, 0.0, 3.5, 1 / 3, 0.0, 1, 1024.0, 0.0, math.inf)
@example(4.0, 0.0, math.nan, 0.0, 4e-4, 1, 2.0, 1.0, math.inf)
@example(4.0, 0.0, math.nan, 0.0, -4.1e-4, 1, 2.0, 1.0, math.inf)
@example(4.0, 0.0, math.nan, 0.0, 0.0, 0, 2.0, 1.0, math.inf)
@example(0.0, 0.0, math.nan, 0.0, 0.0, 2, 2.0, 1.0, math.inf)
@example(4.0, 0.0, math.nan, 0.0, 0.0, 1, 2.0, 1.0, 1.0)
@example(4.0, 0.0, math.nan, 0.0, 0.0, 1, 2.0, 1.0, 0.5)
@example(4.0, 0.0, math.nan, 0.0, 0.0, 1, 2.0, 1.0, 1.0 - 1e-9)
@example(4.0, 1.0, math.nan, 0.0, 0.0, 1, 2.0, 1.0, 0.5)
def test_decision_equals_host_numbers(
    backend: Backend,
    sum_squares: float,
    non_finite: float,
    zeros: float,
    errors: float,
    contrast: float,
    scaled: int,
    scale: float | None,
    clip_grad: float,
    most_norm: float,
) -> None:
    """Every number of the decision has the oracle's bits; a NaN is a NaN. The statistics are left as they are."""
    given_vector = [sum_squares, non_finite, zeros, errors, contrast, float(scaled)]
    device = _device(backend)
    vector = torch.tensor(given_vector, dtype=torch.float64, device=device)
    held = None if scale is None else torch.tensor([scale], device=device)
    decision = backend.decide(vector, held, clip_grad, most_norm)
    numbers = [decision.found_inf, decision.coefficient, decision.grad_norm, decision.num_zeros, decision.overflow]
    numbers.append(decision.success)
    np.testing.assert_equal([number.item() for number in numbers], _oracle(given_vector, scale, clip_grad, most_norm))
    assert [number.dtype for number in numbers] == [*[torch.float32] * 3, torch.float64, torch.float32, torch.bool]
    assert all(number.shape == () for number in numbers)
    np.testing.assert_equal(vector.tolist(), given_vector)


rows = st.tuples(
    st.floats(0, 1e30),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.sampled_from([0.0, 1 / 3, 0.5, 1.0]),
    st.sampled_from([-1.0, 0.0, 0.5]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(rows, min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.integers(1, 700),
)
def test_total_equals_host_numbers(
    backend: Backend,
    some: list[tuple[float, ...]],
    counted: bool,
    compared: bool,
    apart: bool,
    errors: int,
    repeats: int,
) -> None:
    """Weighted squares and zeros to fp64's accuracy, counts exactly, for columns of one table or of their own."""
    table = torch.tensor(some * repeats, dtype=torch.float64, device=_device(backend))
    squares, non_finite, zeros, *weights = (column.clone() if apart else column for column in table.unbind(1))
    shares, contrasts = (column.contiguous() for column in weights)
    vector = backend.total(
        TensorStats(squares, non_finite, zeros if counted else None),
        GradWeights(shares, contrasts if compared else None),
        torch.tensor(float(errors), dtype=torch.float64, device=table.device),
        1.0,
    )
    assert vector.shape == (len(Statistic),)
    assert vector.dtype == torch.float64
    found = dict(zip(Statistic, vector.tolist(), strict=True))
    assert found[Statistic.SUM_SQUARES] == pytest.approx(
        math.fsum(row[0] * row[3] for row in some) * repeats, rel=1e-12
    )
    assert found[Statistic.NON_FINITE] == sum(row[1] for row in some) * repeats
    if counted:
        assert found[Statistic.ZEROS] == pytest.approx(math.fsum(row[2] * row[3] for row in some) * repeats, rel=1e-12)
    else:
        assert math.isnan(found[Statistic.ZEROS])
    assert found[Statistic.ERRORS] == errors
    size = math.fsum(row[0] for row in some) * repeats
    contrast = math.fsum(row[0] * row[4] for row in some) * repeats if compared else 0.0
    assert found[Statistic.CONTRAST] == pytest.approx(contrast, rel=1e-12, abs=1e-12 * size)
    assert found[Statistic.SCALED] == 1.0


def test_total_keeps_what_is_not_finite(backend: Backend) -> None:
    """A square that is inf stays, and a copy that counts nothing makes it NaN: neither is lost in the sum."""
    for weight, kept in ((1.0, math.isinf), (0.0, math.isnan)):
        squares, none, weights = (
            torch.tensor(values, dtype=torch.float64, device=_device(backend))
            for values in ([1.0, math.inf], [0.0, 1.0], [1.0, weight])
        )
        vector = backend.total(
            TensorStats(squares, none, None), GradWeights(weights, None), torch.zeros_like(none[0]), 1.0
        )
        assert kept(vector[0].item())
        assert vector[1].item() == 1


@pytest.mark.native
def test_kernels_decide_in_few_operators() -> None:
    """Totals, a decision and the scale after it cost native allocations and a view, no arithmetic of torch's."""
    native = select_backend("native")
    scaler = _scaler(native, 2.0**16)
    sums, no_errors = torch.zeros(7, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    with OperatorCounter() as counter:
        vector = native.total(TensorStats(sums, sums, None), GradWeights(sums, sums), no_errors, 1.0)
        decision = native.decide(vector, scaler.scale, 1.0)
        scaler.update(decision.found_inf)
    assert counter.host_reads == 0
    assert {str(operator) for operator in counter.counts} == {"aten.empty.memory_format", "aten.unbind.int"}


def test_autograd_hears_that_the_scale_has_changed(backend: Backend) -> None:
    """Backward through a loss scaled before the update would use the scale after it: torch must refuse."""
    scaler = _scaler(backend, 2.0)
    loss = torch.ones((), device=scaler.device, requires_grad=True) * scaler.scale.reshape(())
    scaler.update(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("found_inf", [torch.tensor(1e-300, dtype=torch.float64), torch.tensor([[True]]), math.nan])
def test_any_form_of_found_inf(backend: Backend, found_inf: Tensor | float) -> None:
    """Whatever is not 0 was found: a number too small for fp32, a bool of any shape, NaN."""
    scaler = _scaler(backend, 1024.0)
    scaler.update(torch.as_tensor(found_inf))
    assert scaler.scale.tolist() == [512.0]
