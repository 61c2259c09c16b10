"""The picture of runs: what is drawn where, from the files that runs leave."""

import sys
from pathlib import Path

import pytest

from megascale.errors import RunError
from megascale.report.runs import read_run
from megascale.train.figure import draw_runs

ROWS = """step,loss,batch_accuracy,total_accuracy,grad_norm,scale,skipped
0,nan,0.1,nan,inf,8,1
1,2.0,0.3,0.5,0.25,4,0
2,1.0,0.5,0.5,0.125,4,0
"""


def _drawn(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[list[tuple[list[float], list[float]]]]:
    """Return, by panel, steps and values of each line of a figure of one run with two seeds."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    (folder / "metrics.csv").write_text(ROWS)
    figures: list[object] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    run = read_run(folder / "metrics.csv")
    draw_runs({"a run": [run, run]}, folder / "figure.png")
    (figure,) = figures
    return [[(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines] for panel in figure.axes]  # type: ignore[attr-defined]


def test_every_panel_shows_its_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loss and batch accuracy averaged, scale as a power of two, skips added up; what is not finite is left out."""
    loss, batch, total, norm, scale, skips = [panel[0] for panel in _drawn(monkeypatch, tmp_path)]
    assert loss == ([1, 2], [2.0, 1.5])
    assert batch[0] == [0, 1, 2]
    assert batch[1] == pytest.approx([0.1, 0.2, 0.3])
    assert total == ([1, 2], [0.5, 0.5])
    assert norm == ([1, 2], [0.25, 0.125])
    assert scale == ([0, 1, 2], [3, 2, 2])
    assert skips == ([0, 1, 2], [1, 1, 1])
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_each_seed_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two seeds of a run: two lines a panel, of one colour and one entry in the legend."""
    assert [len(panel) for panel in _drawn(monkeypatch, tmp_path)] == [2] * 6


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the remedy, and no picture."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match="pip install matplotlib"):
        draw_runs({"a run": []}, tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())
