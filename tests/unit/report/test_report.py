"""python -m megascale report: what is drawn of runs of any length, and errors that name the file."""

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import numpy as np
import pytest

from megascale.cli import main
from megascale.report.envelopes import envelope, marks
from megascale.report.panels import panels_of
from megascale.report.runs import read_runs

HEADER = "step,loss,grad_norm,scale,skipped,seconds/forward"


def _run(folder: Path, lines: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text("".join(f"{line}\n" for line in [HEADER, *lines]))
    return folder


@pytest.mark.slow
def test_page_and_picture_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of one step and of many over one another: a page that fetches nothing, with both names, and a PNG."""
    pytest.importorskip("matplotlib")
    one = _run(tmp_path / "one", ["0,2.5,1.0,65536,0,0.1"])
    many = _run(tmp_path / "many", [f"{i},nan,inf,{2.0 ** (16 - i)},1,0.1" for i in range(9)])
    keys = {"step": 3, "scale": 8.0, "rank": 1, "parameter": "a<b", "kind": "inf", "num_inf": 2, "num_nan": 0}
    unknown = keys | {"num_inf": None, "num_nan": None, "parameter": "c", "loss_finite": False, "module": "blocks.0"}
    (many / "overflows.jsonl").write_text(f"{json.dumps(keys)}\n{json.dumps(unknown)}\n" + '{"step": 4, "par')
    (many / "config.yaml").write_text("# python -m megascale.train steps=9 'a=<b>'\nsteps: 9\n# end\n")
    (many / "summary.json").write_text('{"seconds": 100.2}')
    out, png = tmp_path / "report.html", tmp_path / "report.png"
    assert main(["report", str(one), str(many), "--out", str(out), "--png", str(png)]) == 0
    assert capsys.readouterr().out.split() == [str(out), str(png)]
    page = out.read_text()
    assert "://" not in page
    assert all(text in page for text in (">one<", ">many<", "all 9 steps were skipped", "a&lt;b", "Mean wall time"))
    assert "<td>2</td><td>0</td>" in page
    assert "<td>-</td><td>-</td>" in page
    assert "many: in 1 skipped steps the loss itself was inf or NaN" in page
    assert "Forward made it first in blocks.0 (1 steps)." in page
    assert "<title>step 3; many: 8192</title>" in page  # what a pointer shows over the panel of the scale
    assert page.count('<p class="legend">') == page.count("<figure>")
    assert "prefers-color-scheme: dark" in page
    assert f"<code>megascale report {one} {many} --out {out} --png {png}</code>" in page
    assert "<p><b>many</b>: <code>python -m megascale.train steps=9 &#x27;a=&lt;b&gt;&#x27;</code></p>" in page
    assert "steps: 9\n# end" in page
    assert "<td>1 min 40 s</td>" in page
    assert len(page) < 2_000_000
    assert png.read_bytes().startswith(b"\x89PNG")


WIDTHS = (420, 1400)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


@pytest.mark.slow
def test_page_never_scrolls_sideways(tmp_path: Path) -> None:
    """In a narrow window tables scroll in boxes of their own, and long names of runs wrap; measured by a browser."""
    pytest.importorskip("matplotlib")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    runs = [_run(tmp_path / (name * 70), [f"{i},nan,inf,{2.0 ** (16 - i)},1,0.1" for i in range(9)]) for name in "ab"]
    keys = {"step": 3, "scale": 8.0, "rank": 1, "parameter": "layer." * 20, "kind": "inf", "num_inf": 2, "num_nan": 0}
    (runs[0] / "overflows.jsonl").write_text(json.dumps(keys) + "\n")
    out, frames = tmp_path / "report.html", tmp_path / "frames.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    # A headless window cannot be as narrow as a telephone, a frame can.
    inner = "".join(f'<iframe style="width:{width}px" srcdoc="{escape(out.read_text())}"></iframe>' for width in WIDTHS)
    measure = (
        "onload = () => document.title = [...document.querySelectorAll('iframe')].map(frame => {"
        "const page = frame.contentDocument, boxes = [...page.querySelectorAll('.wide')];"
        "return [page.documentElement.clientWidth, page.documentElement.scrollWidth,"
        "Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth))].join(' ')}).join(', ')"
    )
    frames.write_text(f"<!DOCTYPE html><html><body>{inner}<script>{measure}</script></body></html>")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    command = [browser, *options, frames.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (title,) = re.findall("<title>([^<]*)</title>", done.stdout.partition("<body>")[0])
    for width, sizes in zip(WIDTHS, title.split(", "), strict=True):
        visible, needed, hidden = map(int, sizes.split())
        assert width - 40 < visible <= width
        assert needed == visible
        assert hidden > 0, "the tables are to need more than the window"


def test_no_spike_of_a_long_run_is_lost() -> None:
    """Of 100,000 steps, 600 points are left, the one spike, the one drop and the one skip among them."""
    steps = np.arange(100_000.0)
    values = np.sin(steps)
    values[[5, 77_777, 99_999]] = [-50, 60, np.inf]
    line = envelope(steps, values, 600)
    assert 500 < len(line.steps) <= 600
    assert (line.steps[line.values.argmax()], line.steps[line.values.argmin()]) == (77_777, 5)
    assert (np.diff(line.steps) > 0).all()
    assert marks(steps, steps == 54_321, 400).tolist() == [54_321]
    assert len(marks(steps, np.ones(100_000), 400)) <= 400


def test_half_a_line_is_left_out_and_a_step_counts_as_it_ran_last(tmp_path: Path) -> None:
    """As killed and resumed runs leave them."""
    folder = _run(tmp_path / "run", ["0,1,1,1,0,1", "1,2,1,1,0,1", "1,3,1,1,0,"])
    with open(folder / "metrics.csv", "a") as stream:
        stream.write("2,5,1,1,0,0.1")
    (run,) = read_runs([tmp_path])
    assert (run.label, run.get("loss").tolist()) == ("run", [1, 3])
    assert np.isnan(run.get("seconds/forward")[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no metrics.csv"),
        ("", "has no column 'step'"),
        ("name,value\na,1\n", "has no column 'step'"),
        ("step,loss\n", "has no step yet"),
        ("step,loss\n0,1\n1\n", "line 3 has 1 cells, its first line 2; remove that line"),
        ("step,loss\n0,high\n", "column loss: could not convert string to float: 'high'"),
    ],
)
def test_broken_files_are_named(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, and one line that names the file and what to do."""
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    assert main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert message in said
    assert said.count("\n") == 1


def test_columns_that_never_vary_have_no_panel(tmp_path: Path) -> None:
    """But for the loss, the scale and skipped steps; of a run of one step everything is shown."""
    lines = ["0,2,1.5,65536,0,0.1", "1,1,1.5,65536,0,0.1"]
    runs = read_runs([_run(tmp_path / "two", lines)])
    assert [panel.column for panel in panels_of(runs)][:3] == ["loss", "scale", "skipped"]
    one = read_runs([_run(tmp_path / "one", lines[:1])])
    assert "grad_norm" in [panel.column for panel in panels_of(one)]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """By as much of their paths as that takes."""
    folders = [_run(tmp_path / seed / "run", ["0,1,1,1,0,1"]) for seed in ("a", "b")]
    assert [run.label for run in read_runs(folders)] == ["a/run", "b/run"]
