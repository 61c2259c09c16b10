"""``megascale report RUN...``: draw runs as one page, and one picture."""

import argparse
from pathlib import Path

from megascale.errors import ArgumentError
from megascale.report.panels import panels_of
from megascale.report.runs import read_runs

NAME = "report"
HELP = "draw the metrics of one run, or of several over one another, as one HTML page that needs no network, or a PNG"
AS_TYPED: dict[str, str] = {}
PAGE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, its metrics.csv, or a folder of runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the page to write (default {PAGE})")
    parser.add_argument("--png", type=Path, metavar="FILE", help="a picture to write; alone: no page")


def run(given: argparse.Namespace) -> int:
    """Read the runs, and write the page and the picture."""
    runs = read_runs(given.runs)
    from megascale.report.drawing import write_png  # needs matplotlib
    from megascale.report.page import page

    panels = list(panels_of(runs))
    out = Path(PAGE) if given.out is None and given.png is None else given.out
    for path in (out, given.png):
        if path is None:
            continue
        try:
            if path is out:
                path.write_text(page(runs, panels, _typed(given)), encoding="utf-8")
            else:
                write_png(panels, runs, path)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written: {error}; choose another file") from None
        print(path)
    return 0


def _typed(given: argparse.Namespace) -> str:
    """Return the command, as it is typed."""
    options = [f"--{name} {value}" for name in ("out", "png") if (value := getattr(given, name)) is not None]
    return " ".join(["megascale report", *map(str, given.runs), *options])
