"""Progress bars: on a terminal alone, for large files, silenced where asked; never in what a log keeps."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint import Checkpointer, consolidate, progress
from megascale.checkpoint.__main__ import main as checkpoint_program
from megascale.cli import main as program
from megascale.interop import convert
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
        (lambda to, on: Checkpointer(runs, progress=on).load(model, optimizer), ["verifying step_00000001", "reading"]),
        (
            lambda to, on: consolidate(runs, to, optimizer=True, progress=on),
            ["verifying step_00000001", "reading", "writing"],
        ),
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


def test_no_bar_in_a_log_for_little_or_without_tqdm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to a file, nor to a terminal for a small checkpoint, nor without tqdm, which is optional."""
    model, optimizer = _saved(tmp_path / "small")
    with terminal() as shown:
        Checkpointer(tmp_path / "small").save(2, model, optimizer)
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
