"""last_overflow() and report_overflows() on one rank: what they name, when, and what clean steps cost."""

import gc
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, amp
from megascale.debug import report_overflows
from megascale.debug.reporting import line_of
from megascale.errors import ArgumentError
from megascale.step.overflow_report import (
    NonFiniteLoss,
    NonFiniteModule,
    OverflowEntry,
    OverflowReport,
    TensorStatistics,
    in_order,
    merged,
)
from megascale.step.overflows import MOST_LOSSES, Losses, OverflowRecorder, non_finite_losses
from tests.counting import OperatorCounter
from tests.overflow_cases import AmpLoop, Planted, report_of, rows_of, step

KEYS = {
    *("step", "scale", "rank", "parameter", "kind", "num_inf", "num_nan", "numel", "largest_finite", "micro_batch"),
    *("origin", "loss_finite", "module", "module_phase", "module_rank"),
}
ROW = ("middle.weight", 0, "inf", 2, 0)


def _wrapped() -> tuple[Planted, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    model = Planted().half()
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    return model, MixedPrecisionOptimizer(inner, None, DynamicGradScaler(2.0**4, 1.0, hysteresis=1))


def _overflow(model: Planted, optimizer: Any) -> None:
    model.values = [math.inf, -math.inf]
    assert not step(model, optimizer)
    model.values = []


def _as_on_an_accelerator(optimizer: MixedPrecisionOptimizer) -> None:
    """Let the host learn of a step one step late, as where statistics do not lie in its memory."""
    optimizer._recipe.errors.on_host = optimizer._recipe.overflows._on_host = False


def test_the_last_overflow_is_named() -> None:
    """No report before the first skip. What was asked for while gradients were there stays known."""
    model, optimizer = _wrapped()
    assert optimizer.last_overflow(gather=True) is None
    assert step(model, optimizer)
    assert optimizer.last_overflow() is None
    _overflow(model, optimizer)
    report = report_of(optimizer)
    assert step(model, optimizer)
    assert optimizer.last_overflow(gather=True) == replace(report, all_ranks=True, at_the_step=())
    assert rows_of(report) == [ROW]
    assert (report.step, report.scale, report.entries[0].micro_batch) == (1, 2.0**4, 0)
    assert 0 < (report.entries[0].largest_finite or 0) < 2.0**4
    assert "middle.weight <- likely origin" in str(report)
    assert report.before_reduction


def test_origin_is_the_latest_parameter_of_the_first_micro_batch() -> None:
    """Backward carries inf and NaN towards the input, so that the origin is the last in the order of forward."""
    model, optimizer = _wrapped()
    report_overflows(optimizer, model=model, log=False)
    optimizer.zero_grad()
    inputs = torch.ones(3, 6, dtype=torch.float16)
    optimizer.scale_loss(model(inputs).float().sum()).backward()
    model.values = [math.nan]
    optimizer.scale_loss(model(inputs).float().sum()).backward()
    optimizer.scale_loss(model.head(torch.full((3, 8), math.inf).half()).float().sum()).backward()
    optimizer.step()
    report = report_of(optimizer)
    assert [(one.parameter, one.micro_batch) for one in report.entries] == [("middle.weight", 1), ("head.weight", 2)]
    assert report.origin is report.entries[0]
    _overflow(model, optimizer)
    report = report_of(optimizer)
    assert [one.micro_batch for one in report.entries] == [0]


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_that_was_not_finite_is_told_and_no_parameter_blamed(late: bool) -> None:
    """Forward made NaN in the first layer: all gradients are NaN, and the last parameter is innocent. On an accelerator
    one step late, too, when gradients are gone.
    """
    model, optimizer = _wrapped()
    if late:
        _as_on_an_accelerator(optimizer)
    optimizer.zero_grad()
    optimizer.scale_loss(model(torch.full((3, 6), math.nan).half()).float().sum()).backward()
    optimizer.step()
    if late:
        assert step(model, optimizer)
    report = report_of(optimizer)
    assert report.origin is None
    assert report.loss_was_finite is False
    assert len(report.entries) == 3
    assert "the loss was nan on rank 0 in micro-batch 0, so forward made it; megascale.debug.watch" in str(report)
    assert "likely" not in str(report) + line_of(report, 1)
    assert report.worst().startswith("; the loss was nan on rank 0")
    assert {(row["origin"], row["loss_finite"]) for row in report.rows()} == {(False, False)}


def test_losses_are_bounded_and_forgotten() -> None:
    """A loop that never steps fills no memory; then nothing is known of losses. A step begins anew."""
    losses = Losses()
    for _ in range(MOST_LOSSES + 1):
        losses.add(torch.ones(()))
    assert len(losses._kept) == MOST_LOSSES
    assert losses.take() is None
    losses.add(torch.tensor([1.0, math.inf, math.nan]))
    found = non_finite_losses(losses.take(), 3)
    assert found is not None
    assert [str(loss) for loss in found] == ["inf on rank 3 in micro-batch 0"]
    losses.add([torch.ones(()), torch.ones(())])
    assert losses.take() is None
    losses.add(iter([torch.ones(())]))
    assert losses.take() is None


def test_one_ranks_lost_loss_is_every_ranks() -> None:
    """Gathered, the rank is named; an unknown loss of one rank leaves finite ones unknown."""
    bad = NonFiniteLoss(1, 0, math.nan)
    entries = (_entry("a", 0, 0),)
    for losses, expected in (([(), (bad,)], False), ([None, (bad,)], False), ([None, ()], None), ([(), ()], True)):
        ranks = [OverflowReport(3, 8.0, entries, losses=one) for one in losses]
        assert merged(ranks).loss_was_finite is expected
    assert OverflowReport(3, 8.0, entries, losses=()).loss_was_finite is None  # its gradients are sums over ranks


def test_a_sum_of_squares_beyond_fp32_has_no_entries() -> None:
    """All elements are finite, and the step is skipped."""
    model = nn.Linear(2, 1)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.grad = torch.full_like(model.weight, 1e30)
    assert not bool(optimizer.step().success)
    report = report_of(optimizer)
    assert str(report).endswith("last_overflow(gather=True), on every rank, tells of all")
    report = report_of(optimizer, gather=True)
    assert (report.entries, report.scale) == ((), 1.0)
    assert "the sum of their squares is beyond fp32" in str(report)


@pytest.mark.parametrize("late", [False, True])
def test_kinds_are_named_between_steps_only(late: bool) -> None:
    """Right after the step gradients are there. Later their counts are known, and that they are gone."""
    model, optimizer = _wrapped()
    if late:
        _as_on_an_accelerator(optimizer)
    _overflow(model, optimizer)
    assert rows_of(optimizer.last_overflow()) == [ROW]
    _overflow(model, optimizer)
    assert step(model, optimizer)
    model.middle.weight.grad = torch.zeros_like(model.middle.weight)
    model.middle.weight.grad[0, :2] = math.inf  # of the next backward, as many as there were
    report = report_of(optimizer)
    assert rows_of(report) == [("middle.weight", 0, None, None, None)]
    assert (report.step, report.entries[0].num_non_finite, report.scale) == (1, 2, None if late else 2.0**3)
    assert "2 inf or nan" in str(report)


def test_other_gradients_are_not_taken_for_those_of_the_step() -> None:
    """Gradients that hold another number of inf and NaN than the step has counted are newer ones."""
    model, optimizer = _wrapped()
    _overflow(model, optimizer)
    model.middle.weight.grad = torch.full_like(model.middle.weight, math.nan)
    assert rows_of(optimizer.last_overflow()) == [("middle.weight", 0, None, None, None)]


def test_a_reporter_tells_everything_one_step_late() -> None:
    """On an accelerator too: kinds, counts and scale of the step before."""
    model, optimizer = _wrapped()
    _as_on_an_accelerator(optimizer)
    reporter = report_overflows(optimizer, log=False)
    _overflow(model, optimizer)
    assert reporter.num_skips == 0
    assert step(model, optimizer)
    assert reporter.num_skips == 1
    report = report_of(optimizer)
    assert rows_of(report) == [ROW]
    assert (report.step, report.scale) == (0, 2.0**4)


def test_a_line_and_json_for_each_skip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has a line at the 1st, 2nd, 4th skip; the file has a line for each parameter of each."""
    model, optimizer = _wrapped()
    path = tmp_path / "runs" / "1" / "overflows.jsonl"
    reporter = report_overflows(optimizer, path=path)
    with caplog.at_level(logging.WARNING, logger="megascale"):
        for _ in range(5):
            _overflow(model, optimizer)
            step(model, optimizer)
    assert reporter.num_skips == 5
    assert [record.getMessage().split(";")[1] for record in caplog.records] == [
        " skip 1, the next line is about skip 2",
        " skip 2, the next line is about skip 4",
        " skip 4, the next line is about skip 8",
    ]
    assert "likely from 'middle.weight' (rank 0: 2 of 64 inf)" in caplog.records[0].getMessage()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(row) for row in rows] == [KEYS] * 5
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8]
    assert [(row["kind"], row["micro_batch"]) for row in rows] == [("inf", 0)] * 5


def _bare_record(*given: Any, capturing: bool) -> SimpleNamespace:
    return SimpleNamespace(found_inf=given[3], scaler=given[4], step=None)


def _operators(reports: bool, recorder: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    model, optimizer = _wrapped()
    if reports:
        report_overflows(optimizer)
    with monkeypatch.context() as patched:
        if not recorder:
            patched.setattr(OverflowRecorder, "record", _bare_record)
            patched.setattr(OverflowRecorder, "on_skip", lambda *_: None)
        step(model, optimizer)
        optimizer.zero_grad()
        optimizer.scale_loss(model(torch.ones(3, 6, dtype=torch.float16)).float().sum()).backward()
        with OperatorCounter() as counter:
            optimizer.step()
    return counter


def test_clean_steps_cost_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 5: a clean step dispatches what it does without a recorder, and reads nothing, with reports too."""
    without = _operators(False, False, monkeypatch)
    for reports in (False, True):
        counter = _operators(reports, True, monkeypatch)
        assert counter.counts == without.counts
        assert counter.host_reads == 0


def test_removed_reporters_leave_nothing() -> None:
    """Invariant 11: after remove(), or when the optimizer is gone, gradients have no hooks."""
    model, optimizer = _wrapped()

    def hooks() -> list[int]:
        return [len(param._backward_hooks or ()) for param in model.parameters()]

    reporter = report_overflows(optimizer, model=model)
    assert hooks() == [1] * 6
    reporter.remove()
    assert hooks() == [0] * 6
    _overflow(model, optimizer)
    assert reporter.num_skips == 0
    model.first.bias.requires_grad_(False)
    report_overflows(optimizer)
    assert hooks() == [1, 0, 1, 1, 1, 1]
    del optimizer, reporter
    gc.collect()
    assert hooks() == [0] * 6


def test_members_that_are_reported_on_cannot_be_chained() -> None:
    """Nothing has changed then. Of the chain one report tells of all."""
    model, scaler = Planted().half(), DynamicGradScaler(2.0**4, 1.0, hysteresis=1)
    parts = [
        MixedPrecisionOptimizer(torch.optim.AdamW(list(layer.named_parameters(prefix=name))), None, scaler)
        for name, layer in model.named_children()
    ]
    reporter = report_overflows(parts[1], log=False)
    with pytest.raises(ArgumentError, match=r"reports on one of the optimizers: call remove\(\)"):
        ChainedOptimizer(parts)
    assert parts[1]._recipe.overflows.listener is reporter
    reporter.remove()
    chain = ChainedOptimizer(parts)
    reporter = report_overflows(chain, log=False)
    assert [len(param._backward_hooks or ()) for param in model.parameters()] == [1] * 6
    chain.get_loss_scale()
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    chain.step()
    assert reporter.num_skips == 1
    assert len(rows_of(parts[2].last_overflow())) == len(rows_of(chain.last_overflow())) == 6


def test_a_full_disk_stops_the_file_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first rank alone writes: an error there would leave the others waiting."""
    model, optimizer = _wrapped()
    path = tmp_path / "overflows.jsonl"
    reporter = report_overflows(optimizer, path=path)
    path.unlink()
    path.mkdir()
    _overflow(model, optimizer)
    _overflow(model, optimizer)
    assert reporter.num_skips == 2
    assert sum("no longer written" in record.getMessage() for record in caplog.records) == 1


def test_amp_names_parameters() -> None:
    """Names come from the optimizer; gradients were unscaled in place. A disabled scaler has no report."""
    model = Planted()
    loop = AmpLoop(model)
    assert step(model, loop)
    assert loop.last_overflow() is None
    _overflow(model, loop)
    report = report_of(loop)
    assert rows_of(report) == [ROW]
    assert (report.step, report.scale) == (1, 2.0**4)
    assert amp.GradScaler("cpu", enabled=False).last_overflow() is None


def _entry(name: str, rank: int, place: int) -> OverflowEntry:
    return OverflowEntry(name, rank, None, 1, 0, 1, 8, 1.0, place)


def _watched(seen: tuple[OverflowEntry, ...], at_the_step: tuple[OverflowEntry, ...]) -> OverflowReport:
    return OverflowReport(3, 8.0, seen, before_reduction=True, at_the_step=at_the_step)


def test_ranks_are_merged() -> None:
    """Own gradients count before reduced ones, which are told of once where all ranks have them alike."""
    spread = [OverflowReport(3, 8.0, (_entry("a", rank, 0),)) for rank in range(3)]
    assert [(one.parameter, one.rank) for one in merged(spread).entries] == [("a", None)]
    one_rank = [OverflowReport(3, 8.0, (_entry("a", 1, 0),)), OverflowReport(3, 8.0, ())]
    assert [one.rank for one in merged(one_rank).entries] == [1]
    own = [_watched((_entry("b", 1, 1),), (_entry("a", 1, 0),)), _watched((), ())]
    assert [one.parameter for one in merged(own).entries] == ["b"]
    in_the_sum = [_watched((), (_entry("a", rank, 0),)) for rank in range(2)]
    report = merged(in_the_sum)
    assert [(one.parameter, one.rank) for one in report.entries] == [("a", None)]
    *_, row, note = str(report).splitlines()
    assert row.split()[:6] == ["a", "<-", "likely", "origin", "all", "?"]
    assert note.startswith("(ranks: of gradients as they were at the step")
    assert "more" not in str(report)


def test_the_module_of_the_first_forward_is_told() -> None:
    """Of several ranks: forward before backward, then the earliest call, then the lowest rank."""
    numbers = TensorStatistics(0.0, 1.0, 0.5, 0.0, torch.float16)
    seen = [("c", "backward", 0), ("a", "forward", 2), None, ("b", "forward", 1), ("d", "forward", 1)]
    ranks = [
        OverflowReport(3, 8.0, (), module=None if one is None else NonFiniteModule(*one, numbers, numbers, rank))
        for rank, one in enumerate(seen)
    ]
    module = merged(ranks).module
    assert module is not None
    assert (module.module, module.rank) == ("b", 3)


def test_steps_of_a_graph_are_reported_as_they_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a captured step are written anew by each replay: a report is about the last one."""
    model, optimizer = _wrapped()
    with monkeypatch.context() as patched:
        patched.setattr("megascale.step.recipe.is_capturing", lambda _: True)
        _overflow(model, optimizer)
    captured = optimizer._recipe.captured()
    reporter = report_overflows(optimizer, log=False)
    for replays in range(1, 3):
        optimizer._recipe.after_replay(captured)
        assert (report_of(optimizer).step, reporter.num_skips) == (replays - 1, replays)


def test_entries_are_in_order() -> None:
    """By parameter, then by micro-batch, an unknown one as the first, then by rank, all ranks' before one's."""
    ordered = [
        replace(_entry("a", 0, index), micro_batch=micro_batch, rank=rank)
        for index in (0, 1)
        for micro_batch, rank in ((0, None), (0, 1), (None, 2), (1, None), (1, 0), (2, 0))
    ]
    assert in_order(ordered[::-1]) == tuple(ordered)
