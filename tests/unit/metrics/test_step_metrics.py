"""StepMetrics: rows equal to what a loop that waits would read, without a host read, from the first rank alone."""

import contextlib
import csv
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import ChainedOptimizer, DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError, ArgumentTypeError, UsageError
from megascale.metrics import CsvFile, StepMetrics
from megascale.metrics.rows import Row
from tests.counting import OperatorCounter
from tests.pool import RankPool
from tests.training import Tiny

OVERFLOW_AT = (1, 4)
Rows = list[dict[str, float]]


class Kept:
    """A sink that keeps its rows, and fails after ``room`` of them."""

    def __init__(self, room: int = 1000) -> None:
        self.rows: list[Row] = []
        self.calls: list[str] = []
        self._room = room

    def open(self, start: int) -> None:
        """Note it."""
        self.calls.append(f"open {start}")

    def write(self, row: Row) -> None:
        """Keep the row."""
        if len(self.rows) == self._room:
            raise OSError(28, "No space left on device")
        self.rows.append(row)

    def flush(self) -> None:
        """Note it."""
        self.calls.append("flush")

    def close(self) -> None:
        """Note it."""
        self.calls.append("close")


def _built() -> tuple[nn.Module, MixedPrecisionOptimizer]:
    torch.manual_seed(0)
    model = Tiny().half()
    config = OptimizerConfig(fp16=True, clip_grad=0.5, log_num_zeros_in_grad=True)
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    return model, MixedPrecisionOptimizer(inner, config, DynamicGradScaler(2.0**8, 1.0, 2.0, 0.5, 2, 1))


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).half()
    loss: torch.Tensor = model(x).float().square().mean()
    return loss * math.inf if step in OVERFLOW_AT else loss


def _read_at_once(steps: int) -> Rows:
    """Train in a loop that reads everything as soon as it has been computed."""
    model, optimizer = _built()
    numel = sum(param.numel() for param in model.parameters())
    rows = []
    for step in range(steps):
        loss, scale = _loss(model, step), optimizer.get_loss_scale().item()
        optimizer.scale_loss(loss).backward()
        result = optimizer.step()
        optimizer.zero_grad()
        rows.append(
            {
                "step": step,
                "loss": loss.item(),
                "grad_norm": result.grad_norm.item(),
                "scale": scale,
                "skipped": int(not result.success),
                "zero_grad_fraction": result.num_zeros_in_grad.item() / numel,
                "lr": 1e-2,
            }
        )
    return rows


def _recorded(steps: int, counter: Any = None) -> Rows:
    """Train in a loop that records; read nothing else."""
    model, optimizer = _built()
    sink = Kept()
    metrics = StepMetrics(optimizer, [sink])
    for step in range(steps):
        with counter or contextlib.nullcontext():
            loss = _loss(model, step)
            optimizer.scale_loss(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.record(loss=loss)
        assert len(sink.rows) == step * (sink.calls != [])
    metrics.close()
    return [{name: value for name, value in row.items() if name != "seconds"} for row in sink.rows]


def test_rows_are_what_a_waiting_loop_reads() -> None:
    """Loss, norm, scale of the step itself, skips, zeros and learning rate, at every step, skipped ones too."""
    rows = _recorded(6)
    assert repr(rows) == repr(_read_at_once(6))
    assert [row["skipped"] for row in rows] == [0, 1, 0, 0, 1, 0]
    assert [row["scale"] for row in rows] == [256, 256, 128, 128, 256, 128]


def test_recording_reads_nothing() -> None:
    """Invariant 5: steps that are recorded have no host read, as steps that are not."""
    counter = OperatorCounter()
    _recorded(4, counter)
    assert counter.counts
    assert counter.host_reads == 0


def _rows_of_rank() -> tuple[Rows, Rows]:
    return _recorded(6), _read_at_once(6)


def test_first_rank_alone_has_rows(ranks: RankPool) -> None:
    """On 2 ranks: the first one's sink gets what a waiting loop reads there; the other one opens none."""
    (first, expected), (second, _) = ranks.run(2, _rows_of_rank)
    assert repr(first) == repr(expected)
    assert second == []


def _unopened(folder: Path) -> str:
    (folder / "file").write_text("")
    with pytest.raises(ArgumentError) as caught:
        StepMetrics(None, [CsvFile(folder / "file" / "metrics.csv")])
    return str(caught.value)


def test_sink_that_cannot_open_is_an_error_everywhere(ranks: RankPool, tmp_path: Path) -> None:
    """Invariant 7: only the first rank opens the file, and every rank raises its error, naming the path."""
    assert all(f"path={tmp_path}" in message for message in ranks.run(2, _unopened, tmp_path))


def test_metrics_do_not_scale_a_loss() -> None:
    """Reading the scale for a row does not hide that the loss was not scaled."""
    model, optimizer = _built()
    metrics = StepMetrics(optimizer)
    _loss(model, 0).backward()
    metrics.record()
    with pytest.raises(UsageError, match="scale"):
        optimizer.step()


def test_row_before_is_returned_and_can_be_added_to() -> None:
    """A row comes with the next one; numbers measured in between belong to it. Phases are of their step."""
    sink = Kept()
    metrics = StepMetrics(None, [sink], start=7)
    with metrics.phase("forward"), metrics.phase("loss"):
        assert metrics.record(loss=1) is None
    assert metrics.record(loss=torch.tensor([2.0])) == {"step": 7, "loss": 1.0, "seconds": sink.rows[0]["seconds"]}
    metrics.add(accuracy=0.5)
    metrics.flush()
    assert sink.rows[1].keys() == {"step", "loss", "seconds", "seconds/forward", "seconds/loss", "accuracy"}
    assert 0 < sink.rows[1]["seconds/loss"] <= sink.rows[1]["seconds/forward"]
    metrics.record(success=torch.tensor(False))
    metrics.close()
    assert (sink.rows[2]["step"], sink.rows[2]["skipped"]) == (9, 1)
    assert sink.calls == ["open 7", "flush", "close"]


def test_full_disk_does_not_end_training() -> None:
    """A sink that fails is warned of once and left out; the others get every row."""
    full, other = Kept(room=1), Kept()
    metrics = StepMetrics(None, [full, other])
    metrics.record()
    metrics.record()
    with pytest.warns(RuntimeWarning, match="Kept cannot write step 1: .*No space left"):
        metrics.record()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.record()
    assert ([row["step"] for row in full.rows], [row["step"] for row in other.rows]) == ([0], [0, 1, 2])


def test_arguments_are_checked() -> None:
    """Each error names the argument, what it was, and what to do."""
    _, optimizer = _built()
    metrics = StepMetrics(optimizer)
    with pytest.raises(ArgumentError, match=r"loss must have one element, got shape \(2,\)"):
        metrics.record(loss=torch.ones(2))
    with pytest.raises(ArgumentTypeError, match="loss must be a tensor of one element or a number, got str"):
        metrics.record(loss="1")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="grad_norm is recorded already"):
        metrics.record(grad_norm=1.0)
    with pytest.raises(ArgumentTypeError, match="optimizer must be one of megascale's, or None, got SGD"):
        StepMetrics(torch.optim.SGD([torch.ones(1)]))  # type: ignore[arg-type]


def test_chain_has_one_row() -> None:
    """Of a ChainedOptimizer, the norm of all gradients together."""
    model = Tiny().half()
    halves = [list(model.named_parameters())[:3], list(model.named_parameters())[3:]]
    scaler = DynamicGradScaler(2.0**8)
    chain = ChainedOptimizer(
        [MixedPrecisionOptimizer(torch.optim.SGD(half, lr=1e-2), grad_scaler=scaler) for half in halves]
    )
    metrics = StepMetrics(chain)
    chain.scale_loss(_loss(model, 0)).backward()
    norm = chain.step().grad_norm
    metrics.record()
    row = metrics.record()
    assert row is not None
    assert (row["grad_norm"], row["scale"]) == (norm.item(), 256.0)
    assert "zero_grad_fraction" not in row


def _table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def test_csv_grows_by_columns_and_forgets_steps_that_run_again(tmp_path: Path) -> None:
    """Missing values are empty. A file that goes on at step 2 keeps 0 and 1, and no half line."""
    file = CsvFile(tmp_path / "run")
    file.open(0)
    for row in ({"step": 0, "loss": 2.0}, {"step": 1, "loss": math.inf, "accuracy": 0.5}, {"step": 2, "accuracy": 1}):
        file.write(row)
    file.close()
    path = tmp_path / "run" / "metrics.csv"
    kept = ["0,2.0,", "1,inf,0.5"]
    assert path.read_text().split() == ["step,loss,accuracy", *kept, "2,,1"]
    with open(path, "a") as stream:
        stream.write("1,1.0,0.1")
    again = CsvFile(path)
    again.open(2)
    assert path.read_text().split() == ["step,loss,accuracy", *kept]
    again.close()
    path.write_text("name,value\na,1\n")
    with pytest.raises(ArgumentError, match="is no table of steps"):
        CsvFile(path).open(2)
