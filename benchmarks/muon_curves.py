"""Draw AdamW beside Muon, three seeds each: docs/assets/muon_curves.svg, from benchmarks/results/muon_curves.csv.

    python benchmarks/muon_curves.py
    python benchmarks/muon_curves.py --runs runs/muon

With ``--runs``, the folder of the runs whose commands docs/muon.md has, it writes the table first: the mean loss of
every ten steps of each run.
"""

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

import svg
from figure import ROOT, digest

RESULTS = ROOT / "benchmarks" / "results" / "muon_curves.csv"
OUT = ROOT / "docs" / "assets" / "muon_curves.svg"
STROKES = {"AdamW": ("#9a9a9a", 2.5), "Muon": ("#1f83c4", 2.5)}
SPAN = 10
"""Steps whose losses are averaged."""
LOSSES = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
"""Lines across; losses above the last are left out: the first ten steps."""

Curves = dict[str, dict[int, list[float]]]
"""Losses of every seed, by optimizer and last step of the span."""


def write_table(folder: Path, out: Path) -> None:
    """Write the table from the runs' own, which ``metrics.csv`` holds in each run's folder."""
    from megascale.report.runs import read_runs

    with open(out, "w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(["optimizer", "seed", "step", "loss"])
        for run in read_runs([folder]):
            name, _, seed = run.label.rpartition("_seed_")
            optimizer = {"adamw": "AdamW", "muon": "Muon"}[name]
            losses = [float(loss) for loss in run.get("loss")]
            for end in range(SPAN, len(losses) + 1, SPAN):
                table.writerow([optimizer, seed, end, f"{statistics.mean(losses[end - SPAN : end]):.4f}"])


def read_curves(path: Path) -> Curves:
    """Return the losses of the table."""
    curves: Curves = {}
    with open(path, newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            curves.setdefault(row["optimizer"], {}).setdefault(int(row["step"]), []).append(float(row["loss"]))
    return curves


def draw(curves: Curves, source: str) -> str:
    """Return the picture."""
    shapes = [svg.text(0, svg.SIZE, "Loss of a small GPT, mean of ten steps", bold=True)]
    shapes += svg.bands(curves, svg.Axes(LOSSES, 100), STROKES)
    foot = svg.TOP + svg.HEIGHT + 38
    shapes.append(svg.text(svg.LEFT, foot, "step; line: mean of three seeds, band: lowest to highest", size=12))
    title = "Loss of a small GPT over 400 steps, three seeds each: Muon's falls faster and ends lower than AdamW's"
    return svg.picture(title, shapes, foot + 8, source)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table where runs are given, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the six runs; without it: the committed table")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the table")
    parser.add_argument("--out", type=Path, default=OUT, help="the picture")
    given = parser.parse_args(arguments)
    if given.runs is not None:
        write_table(given.runs, given.results)
        print(given.results)
    source = f"{given.results.name} {digest(given.results)}"
    given.out.write_text(draw(read_curves(given.results), source), encoding="utf-8")
    print(given.out)


if __name__ == "__main__":
    main()
