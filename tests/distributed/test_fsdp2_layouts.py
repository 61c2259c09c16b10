"""Tensor parallelism with real forwards and backwards, alone and under FSDP2; and FSDP2's own offload."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.fsdp2_cases import Case, Row, train, whole
from tests.pool import RankPool

STEPS, BAD = 18, {3: 0, 4: 1, 9: 2, 14: 3}  # step: the part of the data whose loss is infinite


def _rows_and_main_params(case: Case) -> tuple[list[Row], Any]:
    module, optimizer = case.build()
    rows = train(module, optimizer, case, range(STEPS), BAD)
    return rows, {name: whole(main) for name, main in optimizer.main_params()}


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        pytest.param((2,), ("tp",), id="tensor_parallel"),
        pytest.param((2, 2), ("dp", "tp"), id="with_fsdp2", marks=pytest.mark.slow),
    ],
)
def test_parallelize_module(ranks: RankPool, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """``parallelize_module`` alone and under FSDP2: DTensors of one and two dimensions and, alone, plain parameters.

    Skips and scales are those of one process. Partial sums travel in fp16, so norms agree within 2e-3, main params
    within 5e-5, a two-hundredth of a step of SGD. Zeros are not compared, as rounding decides about them.
    """
    [(expected, mains)] = ranks.run(1, _rows_and_main_params, Case(inner="momentum"))
    assert set(BAD) <= {step for step, row in enumerate(expected) if not row.landed}
    assert len({row.scale for row in expected}) > 2
    for rows, found in ranks.run(math.prod(shape), _rows_and_main_params, Case(inner="momentum", mesh=(shape, names))):
        for ours, theirs in zip(rows, expected, strict=True):
            assert (ours.landed, ours.scale) == (theirs.landed, theirs.scale)
            assert not theirs.landed or ours.norm == pytest.approx(theirs.norm, rel=2e-3)
        torch.testing.assert_close(found, mains, rtol=0, atol=5e-5)


def _offloaded() -> list[Any]:
    case = Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    plain = Case()
    results: list[list[Any]] = []
    for each in (case, plain):
        module, optimizer = each.build()
        rows = train(module, optimizer, each, range(6), {2: 1})
        mains: list[Tensor] = [whole(main) for _, main in optimizer.main_params()]
        results.append([[(row.landed, row.scale) for row in rows], mains])
    (rows, mains), (plain_rows, plain_mains) = results
    return [rows == plain_rows, [row[0] for row in rows], all(map(torch.equal, mains, plain_mains))]


def test_cpu_offload_policy(ranks: RankPool) -> None:
    """``CPUOffloadPolicy`` where there are CPUs alone: parameters are there already, and every bit is the same."""
    landed = [True, True, False, True, True, True]
    assert ranks.run(2, _offloaded) == [[True, landed, True]] * 2
