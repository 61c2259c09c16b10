"""A planted inf or NaN is named: parameter, rank, kind and count, however ranks share the model."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from megascale import ChainedOptimizer, DistributedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer
from megascale.debug import report_overflows
from megascale.debug.gradients import GradWatch, WatchedParam
from megascale.debug.reporting import _group_of
from megascale.grad_sync import GradSync
from megascale.parallel import ranks_of
from tests.meshes import mesh_of
from tests.overflow_cases import POISON, SCALE, SETTINGS, Planted, owner_of_scale, rows_of, step
from tests.pool import RankPool

BACKENDS = ("torch", "reference", "triton")


def _plant_on_each_rank(setting: str, backend: str) -> list[list[Any]]:
    """Return, for each skipped step, what the report says."""
    network, optimizer, model = SETTINGS[setting](backend)
    reporter = report_overflows(owner_of_scale(optimizer), model=network, log=False)
    reports = []
    for rank in range(4):
        for kind in POISON:
            assert step(network, optimizer)
            if dist.get_rank() == rank:
                model.values = POISON[kind]
            assert not step(network, optimizer)
            model.values = []
            report = optimizer.last_overflow()
            assert report.before_reduction
            assert report.all_ranks
            assert report.origin is report.entries[0]
            assert report.entries[0].micro_batch == 0
            reports.append([report.step, report.scale, rows_of(report)])
    assert reporter.num_skips == len(reports)
    reporter.remove()
    return reports


def _expected() -> list[list[Any]]:
    expected: list[list[Any]] = []
    scale = SCALE
    for rank in range(4):
        for kind in POISON:
            num_nan = sum(value != value for value in POISON[kind])
            row = ("middle.weight", rank, kind, len(POISON[kind]) - num_nan, num_nan)
            expected.append([2 * len(expected) + 1, scale, [row]])
            scale = max(1.0, scale / 2)
    return expected


@pytest.mark.default("ddp-native", "plain-native")
@pytest.mark.parametrize(
    ("setting", "backend"), [*((one, "native") for one in SETTINGS), *(("plain", one) for one in BACKENDS)]
)
def test_planted_overflow_is_named(ranks: RankPool, setting: str, backend: str) -> None:
    """inf, NaN or both on each of four ranks: all name that rank's parameter, kind and counts, and nothing else."""
    assert ranks.run(4, _plant_on_each_rank, setting, backend) == [_expected()] * 4


def _without_a_reporter() -> list[Any]:
    model = Planted().half()
    optimizer = MixedPrecisionOptimizer(
        torch.optim.AdamW(model.named_parameters()), None, DynamicGradScaler(SCALE, 1.0), replicas_may_differ=True
    )
    model.values = POISON["inf"]
    if dist.get_rank() == 0:
        assert not step(model, optimizer)
    else:  # without a gradient
        optimizer.zero_grad()
        assert not optimizer.step().success
    reports = [optimizer.last_overflow(), optimizer.last_overflow(gather=True)]
    return [(rows_of(report), report and report.before_reduction) for report in reports]


def test_nobody_has_looked_at_backward(ranks: RankPool) -> None:
    """Without a reporter: gradients as they were at the step, of this rank or of all; a rank may have none at all."""
    rows = [("middle.weight", 0, "inf", 2, 0)]
    assert ranks.run(2, _without_a_reporter) == [[(rows, False)] * 2, [([], False), (rows, False)]]


def _a_lost_loss(setting: str) -> list[Any]:
    """Give rank 1 an input of NaN, and return what every rank then says of losses and of the origin."""
    network, optimizer, _ = SETTINGS[setting]("torch")
    optimizer.zero_grad()
    dtype = next(network.parameters()).dtype
    inputs = torch.full((3, 6), math.nan if dist.get_rank() == 1 else 1.0, dtype=dtype)
    optimizer.scale_loss(network(inputs).float().sum()).backward()
    assert not optimizer.step().success
    report = optimizer.last_overflow(gather=True)
    return [report.loss_was_finite, report.origin, [str(loss) for loss in report.losses or ()]]


@pytest.mark.parametrize("setting", ["ddp", "grad_sync", "sharded", "fsdp2"])
def test_the_rank_whose_loss_was_lost_is_named(ranks: RankPool, setting: str) -> None:
    """A reduction spreads NaN to all ranks: every rank names the one whose loss it was, and no parameter."""
    expected = [False, None, ["nan on rank 1 in micro-batch 0"]]
    results = ranks.run(2, _a_lost_loss, setting)
    assert results == [expected] * 2


def test_a_scaler_without_a_group_knows_its_own_loss_only(ranks: RankPool) -> None:
    """The rank whose loss was finite does not call the loss finite: its gradients are sums over ranks."""
    quiet, lost = ranks.run(2, _a_lost_loss, "amp")
    assert (quiet[0], quiet[2]) == (None, [])
    assert lost == [False, None, ["nan on rank 1 in micro-batch 0"]]


def _chain_with_reporter(member: int) -> list[Any]:
    """Plant inf on rank 1 in a chain of a sharded optimizer and two others, reported on through one of them."""
    model, scaler = Planted().half(), DynamicGradScaler(SCALE, 1.0, hysteresis=1)
    first, middle, head = (
        [(name, param) for name, param in model.named_parameters() if name.startswith(layer)]
        for layer in ("first", "middle", "head")
    )
    parts = [
        MixedPrecisionOptimizer(torch.optim.AdamW(first), None, scaler, replicas_may_differ=True),
        DistributedOptimizer(torch.optim.AdamW(middle), None, scaler, modules=model),
        MixedPrecisionOptimizer(torch.optim.AdamW(head), None, scaler, grad_sync=GradSync(head)),
    ]
    chain = ChainedOptimizer(parts)
    reporter = report_overflows(parts[member], model=model, log=False)
    if dist.get_rank() == 1:
        model.values = POISON["inf"]
    assert not step(model, chain)
    reports = [chain.last_overflow(), *(part.last_overflow() for part in parts)]
    reporter.remove()
    assert not step(model, chain)
    before_reduction = [report is not None and report.before_reduction for report in reports]
    return [reporter.num_skips, [rows_of(report) for report in reports], before_reduction]


def _reporters_of_members() -> list[list[Any]]:
    return [_chain_with_reporter(member) for member in range(3)]


def test_members_share_the_report_of_their_chain(ranks: RankPool) -> None:
    """A reporter of any member, plain, sharded or with GradSync, made after the chain, reports for all."""
    row = ("middle.weight", 1, "inf", 2, 0)
    assert ranks.run(2, _reporters_of_members) == [[[1, [[row]] * 4, [True] * 4]] * 3] * 2


def _collectives(setting: str) -> list[int]:
    network, optimizer, _ = SETTINGS[setting]("native")
    counts = []
    for _ in range(2):  # DistributedDataParallel arranges its buckets after the first step
        assert step(network, optimizer)
    for reports in (False, True):
        if reports:
            report_overflows(owner_of_scale(optimizer), model=network)
        with CommDebugMode() as mode:
            assert step(network, optimizer)
        counts.append(mode.get_total_counts())
    return counts


@pytest.mark.default("fsdp2", "ddp")
@pytest.mark.native
@pytest.mark.parametrize("setting", SETTINGS)
def test_clean_steps_send_nothing_more(ranks: RankPool, setting: str) -> None:
    """Invariant 8: as many collectives with reports as without, from forward to the end of the step."""
    for without, with_reports in ranks.run(2, _collectives, setting):
        assert without == with_reports


def _groups_of_meshes() -> list[list[int]]:
    """Return the ranks that a scaler's reports are gathered from, by the mesh of the model's DTensors; [] for none."""
    both, ours = (mesh_of(shape, ("a", "b")) for shape in ((1, 2), (2, 1)))
    params = [
        distribute_tensor(torch.ones(4), mesh, [Replicate()] * mesh.ndim)
        for mesh in (mesh_of((2,), ("dp",)), both, both["b"], ours["b"])
    ]
    groups = [_group_of(None, [("plain", nn.Parameter(torch.ones(4))), ("w", nn.Parameter(one))]) for one in params]
    return [sorted(ranks_of(group)) for group in [*groups, _group_of(None, [("plain", nn.Parameter(torch.ones(4)))])]]


def test_a_scaler_learns_the_ranks_of_a_mesh(ranks: RankPool) -> None:
    """The ranks of a mesh with one dimension skip together, be it a part of another mesh; else all ranks do."""
    for rank, found in enumerate(ranks.run(2, _groups_of_meshes)):
        assert found == [[0, 1], [0, 1], [0, 1], [rank], []]


def _files_and_entries(folder: Path) -> tuple[bool, int, list[tuple[Any, ...]]]:
    """Return whether this rank has written its file, its lines in the log, and what backward shows of DTensors."""
    model = Planted().half()
    inner = torch.optim.SGD(model.named_parameters(), lr=1e-3)
    sync = GradSync(model.named_parameters())
    optimizer = MixedPrecisionOptimizer(inner, None, DynamicGradScaler(SCALE, 1.0), grad_sync=sync)
    path = folder / str(dist.get_rank())
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[assignment,method-assign]
    logging.getLogger("megascale").addHandler(handler)
    report_overflows(optimizer, model=model, path=path)
    model.values = POISON["nan"]
    assert not step(model, optimizer)
    logging.getLogger("megascale").removeHandler(handler)
    mesh = mesh_of((2,), ("tp",))
    weight, factors = (
        distribute_tensor(torch.tensor([1.0, 1.0, 1.0, last]), mesh, [Shard(0)]) for last in (1.0, math.inf)
    )
    param = nn.Parameter(weight)
    watch = GradWatch({id(param): WatchedParam("w", 0)}, [param])
    (param * factors).sum().backward()
    return path.exists(), len(lines), [(one.num_inf, one.numel) for one in watch.take().entries()]


def test_the_first_rank_writes_and_each_sees_its_own(ranks: RankPool, tmp_path: Path) -> None:
    """One file and one line for all ranks. Of a DTensor's gradient each rank looks at its part."""
    assert ranks.run(2, _files_and_entries, tmp_path) == [(True, 1, []), (False, 0, [(1, 2)])]
