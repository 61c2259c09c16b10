"""StepMetrics: rows equal to what a loop that waits would read, without a host read, from the first rank alone."""

import contextlib
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.errors import ArgumentError
from megascale.metrics import CsvFile, StepMetrics
from megascale.metrics.sinks import Sink
from tests.counting import OperatorCounter
from tests.pool import RankPool
from tests.training import Tiny

OVERFLOW_AT = (1, 4)
Rows = list[dict[str, float]]


class Kept:
    """A sink that keeps its rows, and fails after ``room`` of them."""

    def __init__(self, room: int = 1000) -> None:
        self.rows: list[Mapping[str, float]] = []
        self.calls: list[str] = []
        self._room = room

    def open(self, start: int) -> None:
        """Note it."""
        self.calls.append(f"open {start}")

    def write(self, row: Mapping[str, float]) -> None:
        """Keep the row."""
        if len(self.rows) == self._room:
            raise OSError(28, "No space left on device")
        self.rows.append(row)

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
                "num_zeros_in_grad": result.num_zeros_in_grad.item(),
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


def _unopened(sink: Sink) -> str:
    with pytest.raises(ArgumentError) as caught:
        StepMetrics(None, [sink])
    return str(caught.value)


class Elsewhere(Kept):
    """A sink of a library that is not installed."""

    def open(self, start: int) -> None:
        """Import it."""
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401


def test_sink_that_cannot_open_is_an_error_everywhere(ranks: RankPool, tmp_path: Path) -> None:
    """Invariant 7: only the first rank opens it, and every rank raises its error, naming file or library."""
    (tmp_path / "file").write_text("")
    (tmp_path / "table.csv").write_text("name,value\na,1\n")
    (tmp_path / "garbage.csv").write_text("step,loss\nx,1\n")
    for sink, message in (
        (CsvFile(tmp_path / "file" / "metrics.csv"), f"CsvFile cannot be opened: .*{tmp_path}/file"),
        (CsvFile(tmp_path / "table.csv"), "table.csv exists and is no table of steps; choose another file"),
        (CsvFile(tmp_path / "garbage.csv"), "CsvFile cannot be opened: "),
        (Elsewhere(), "Elsewhere cannot be opened: No module named 'no_such_library'"),
    ):
        assert all(re.search(message, found) for found in ranks.run(2, _unopened, sink))
    assert (tmp_path / "table.csv").read_text() == "name,value\na,1\n"


def test_the_row_before_is_returned() -> None:
    """A row comes with the next one, and the last one with close(); steps are counted from ``start``."""
    sink = Kept()
    metrics = StepMetrics(None, [sink], start=7)
    assert metrics.record(loss=1) is None
    assert metrics.record(loss=torch.tensor([2.0])) == {"step": 7, "loss": 1.0, "seconds": sink.rows[0]["seconds"]}
    assert metrics.close() == sink.rows[1]
    assert (sink.rows[1]["step"], sink.rows[1]["loss"]) == (8, 2.0)
    assert sink.calls == ["open 7", "close"]
    assert metrics.close() is None


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


def test_csv_grows_by_columns_and_forgets_steps_that_run_again(tmp_path: Path) -> None:
    """Missing values are empty. A file that goes on at step 2 keeps 0 and 1, and no half line."""
    path = tmp_path / "run" / "metrics.csv"
    file = CsvFile(path)
    file.open(0)
    for row in ({"step": 0, "loss": 2.0}, {"step": 1, "loss": math.inf, "accuracy": 0.5}, {"step": 2, "accuracy": 1}):
        file.write(row)
    file.close()
    kept = ["0,2.0,", "1,inf,0.5"]
    assert path.read_text().split() == ["step,loss,accuracy", *kept, "2,,1"]
    with open(path, "a") as stream:
        stream.write("1,1.0,0.1")
    again = CsvFile(path)
    again.open(2)
    assert path.read_text().split() == ["step,loss,accuracy", *kept]
    again.close()
