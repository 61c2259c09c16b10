"""Progress bars: on a terminal alone, for large files, silenced where asked; never in what a log keeps."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import Checkpointer, consolidate
from megascale.checkpoint.__main__ import main as checkpoint_program
from megascale.cli import main as program
from megascale.interop import convert
from megascale.utils import progress
from tests.checkpoint_cases import build, train
from tests.terminal import terminal
from tests.unit.interop.checkpoints import torch_checkpoint


@pytest.fixture
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LEAST_BYTES", 1)


def _saved(folder: Path) -> tuple[Any, Any]:
    model, optimizer = build(0)
    train(model, optimizer, 0, 1)
    Checkpointer(folder, progress=False).save(1, model, optimizer)
    return model, optimizer


@pytest.mark.usefixtures("_small_is_large")
def test_saving_loading_and_converting_show_bars(tmp_path: Path) -> None:
    """Each by its name. The argument and the programs' flag silence it, and a save in the background shows none."""
    model, optimizer = _saved(tmp_path / "runs")
    torch.save(torch_checkpoint(), tmp_path / "last.pt")
    runs, last = str(tmp_path / "runs"), str(tmp_path / "last.pt")
    cases: list[tuple[Callable[[str, bool], Any], list[str]]] = [
        (lambda to, on: Checkpointer(to, progress=on).save(2, model, optimizer), ["saving"]),
        (lambda to, on: Checkpointer(runs, progress=on).load(model, optimizer), ["verifying", "reading"]),
        (lambda to, on: consolidate(runs, to, optimizer=True, progress=on), ["verifying", "reading", "writing"]),
        (lambda to, on: checkpoint_program([runs, to] + ["--no-progress"] * (not on)), ["writing"]),
        (lambda to, on: checkpoint_program([runs] + ["--no-progress"] * (not on)), ["verifying step_00000001"]),
        (lambda to, on: convert(last, to, progress=on), ["writing"]),
        (lambda to, on: program(["convert", last, to] + ["--no-progress"] * (not on)), ["writing"]),
    ]
    for number, (do, names) in enumerate(cases):
        with terminal() as shown:
            do(str(tmp_path / f"quiet{number}"), False)
            assert shown() == ""
            do(str(tmp_path / f"shown{number}"), True)
            text = shown()
        for name in names:
            assert f"{name}:" in text
    with terminal() as shown, Checkpointer(tmp_path / "async", async_save=True) as checkpointer:
        checkpointer.save(3, model, optimizer)
        checkpointer.wait()
        assert shown() == ""


@pytest.mark.usefixtures("_small_is_large")
def test_bars_count_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar ends near its total: headers add some bytes to the tensors'."""
    bars: list[Any] = []
    new = progress._new_bar

    def kept(doing: str, total: int) -> Any:
        bars.append(new(doing, total))
        return bars[-1]

    monkeypatch.setattr(progress, "_new_bar", kept)
    with terminal():
        model, optimizer = build(0)
        train(model, optimizer, 0, 1)
        checkpointer = Checkpointer(tmp_path)
        path = checkpointer.save(1, model, optimizer)
        checkpointer.load(model, optimizer)
        consolidate(tmp_path, tmp_path / "one.pt")
    assert [bar.desc.removesuffix(": ") for bar in bars] == [
        "saving", "verifying", "reading", "verifying", "reading", "writing"
    ]  # fmt: skip
    (data,) = path.glob("*.safetensors")
    whole = data.stat().st_size
    assert (bars[0].n, bars[1].n, bars[1].total) == (whole, whole, whole)
    assert bars[2].n == bars[2].total > 0
    assert bars[5].n == (tmp_path / "one.pt").stat().st_size


def test_no_bar_in_a_log_for_little_or_without_tqdm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to a file, nor to a terminal for a small checkpoint, nor without tqdm, which is optional."""
    with terminal() as shown:
        model, optimizer = _saved(tmp_path / "small")
        Checkpointer(tmp_path / "small").load(model, optimizer)
        assert shown() == ""
        monkeypatch.setattr(progress, "LEAST_BYTES", 1)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "tqdm", None)
            Checkpointer(tmp_path / "small").load(model, optimizer)
            assert shown() == ""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    Checkpointer(tmp_path / "log").save(1, model, optimizer)
    assert log.getvalue() == ""


@pytest.mark.usefixtures("_small_is_large")
def test_a_bar_within_a_bar_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted goes to the innermost bar, after its end to the one around it, and after that to none."""
    made: list[Any] = []

    class Bar:
        def __init__(self, doing: str, total: int) -> None:
            self.counted, self.is_open = list[int](), True
            made.append(self)

        def update(self, count: int) -> None:
            self.counted.append(count)

        def close(self) -> None:
            self.is_open = False

    monkeypatch.setattr(progress, "_new_bar", Bar)
    with terminal():
        with progress.progress_bar("outer", 10, wanted=True):
            progress.advance(1)
            with progress.progress_bar("inner", 10, wanted=True):
                progress.advance(2)
            progress.advance(3)
        progress.advance(4)
        assert [(bar.counted, bar.is_open) for bar in made] == [([1, 3], False), ([2], False)]
        for total in (progress.LEAST_BYTES - 1, progress.LEAST_BYTES):
            with progress.progress_bar("least", total, wanted=True):
                assert len(made) == 2 + (total == progress.LEAST_BYTES)
