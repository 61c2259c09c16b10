"""FSDP2 and tensor parallelism, alone and together, in every precision: one decision, that of fp32 masters by hand."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

from tests.fsdp2_cases import ByHand, Case, Row, train, whole
from tests.pool import RankPool

HSDP = ((2, 2), ("dp_replicate", "dp_shard"))
TP = ((2,), ("tp",))
TP4 = ((4,), ("tp",))
FSDP_AND_TP = ((2, 2), ("dp", "tp"))

EVERY_PART = {3: 0, 4: 1, 9: 2, 14: 3}  # step: the part of the data whose loss is infinite
LATE = {41: 3, 42: 0, 47: 2}


def _rows_and_main_params(case: Case, steps: int, bad: dict[int, int], micro: int) -> tuple[list[Row], Any]:
    module, optimizer = case.build()
    rows = train(module, optimizer, case, range(steps), bad, micro)
    return rows, {name: whole(main) for name, main in optimizer.main_params()}


class Within(NamedTuple):
    """How far a norm (relative) and an element of a main param (absolute) may be from one process's."""

    norm: float
    main: float


# Sums of a step differ in their order alone.
EXACT = Within(norm=1e-6, main=5e-6)
# In fifty steps that may move a main param across the middle between two 16-bit numbers, on some CPUs and not others:
# the last bit of one weight shows in the norm, and moves a main param by up to a hundredth of AdamW's step of 2e-3.
# Skips and scales agree as before.


def _check(
    ranks: RankPool, case: Case, world: int, steps: int, within: Within, *, data_parallel: int, micro: int = 1
) -> None:
    """Compare every rank with one process: skips and scales exactly, and zeros where sums are exact."""
    bad = {step: part for step, part in (EVERY_PART | LATE).items() if step < steps}
    reference = ByHand(case)
    expected = reference.train(data_parallel, range(steps), bad, micro)
    # A scale that has grown makes fp16 gradients overflow by themselves, too.
    assert set(bad) <= {step for step, row in enumerate(expected) if not row.landed}
    assert len({row.scale for row in expected}) > 2
    for rows, mains in ranks.run(world, _rows_and_main_params, case, steps, bad, micro, timeout=120):
        assert [row.landed for row in rows] == [row.landed for row in expected]
        assert [row.scale for row in rows] == [row.scale for row in expected]
        for ours, theirs in zip(rows, expected, strict=True):
            if theirs.landed:
                assert ours.norm == pytest.approx(theirs.norm, rel=within.norm)
                assert within is not EXACT or ours.zeros == theirs.zeros
        assert mains.keys() == reference.masters.keys()
        for name, value in mains.items():
            torch.testing.assert_close(value, reference.masters[name].detach(), rtol=0, atol=within.main)


FSDP2 = {
    "fp16_params": Case(),
    "bf16_params": Case(dtype=torch.bfloat16),
    "fp32_params_fp16_compute": Case(dtype=torch.float32, compute=torch.float16),
    "fp32_params_bf16_compute": Case(dtype=torch.float32, compute=torch.bfloat16),
    "kept_whole_after_forward": Case(reshard=False),
    "momentum": Case(inner="momentum"),
    "its_own_step": Case(inner="adadelta"),
}


@pytest.mark.slow
def test_fsdp2_reduces_in_fp16(ranks: RankPool) -> None:
    """``reduce_dtype`` left at fp16: FSDP2 rounds before, while and after it averages; the decision is the same.

    Main params within 1e-4, a twentieth of a step of AdamW: each gradient was rounded to 11 bits twice more.
    """
    _check(ranks, Case(reduce=None), 4, 18, Within(2e-3, 1e-4), data_parallel=4)


@pytest.mark.parametrize("name", ["fp16_params", pytest.param("fp32_params_fp16_compute", marks=pytest.mark.slow)])
def test_hsdp(ranks: RankPool, name: str) -> None:
    """Two copies of two shards each: copies count once in norm and zeros, and an overflow in one copy skips both."""
    case = FSDP2[name]
    hybrid = Case(dtype=case.dtype, compute=case.compute, mesh=HSDP)
    _check(ranks, hybrid, 4, 18, EXACT, data_parallel=4)


@pytest.mark.parametrize(
    ("mesh", "world", "data_parallel"),
    [
        pytest.param(TP, 2, 1, id="tensor_parallel"),
        pytest.param(FSDP_AND_TP, 4, 2, id="with_fsdp2", marks=pytest.mark.slow),
    ],
)
def test_parallelize_module(ranks: RankPool, mesh: Any, world: int, data_parallel: int) -> None:
    """``parallelize_module`` alone and under FSDP2: DTensors of one and two dimensions and, alone, plain parameters.

    Partial sums travel in fp16, so norms agree within 2e-3, main params within 5e-5, a two-hundredth of a step of SGD.
    Zeros are not compared, as rounding decides about them.
    """
    _check(ranks, Case(mesh=mesh, inner="momentum"), world, 18, Within(2e-3, 5e-5), data_parallel=data_parallel)


@pytest.mark.release
@pytest.mark.parametrize(("mesh", "world", "data_parallel"), [(TP, 2, 1), (TP4, 4, 1), (FSDP_AND_TP, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_parallelize_module_fifty_steps(
    ranks: RankPool, mesh: Any, world: int, data_parallel: int, dtype: torch.dtype
) -> None:
    """Fifty steps on two and four ranks; with fp32 compute nothing is rounded, and norms agree within 1e-5."""
    within = Within(2e-3, 1e-4) if dtype == torch.float16 else Within(1e-5, 5e-6)
    case = Case(dtype=dtype, mesh=mesh, inner="momentum")
    _check(ranks, case, world, 50, within, data_parallel=data_parallel)


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
