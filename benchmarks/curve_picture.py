"""Draw one GPT's training in fp32, fp16 and compact fp16: docs/assets/training_curve.svg, from the points that
benchmarks/curve.py wrote.

    python benchmarks/curve_picture.py
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import svg
from figure import ROOT, digest

RESULTS = ROOT / "benchmarks" / "results" / "curve_cpu.csv"
OUT = ROOT / "docs" / "assets" / "training_curve.svg"
STROKES = {"fp32": ("#9a9a9a", 7.0), "fp16": ("#1f83c4", 3.0), "compact": ("#d55e00", 1.2)}
LOSSES = (2.0, 2.5, 3.0, 3.5)
"""Lines across; losses above the last are left out: the first steps."""


def read_curves(path: Path) -> dict[str, dict[int, list[float]]]:
    """Return the training loss of every seed, by way and step."""
    curves: dict[str, dict[int, list[float]]] = {}
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            curves.setdefault(row["way"], {}).setdefault(int(row["step"]), []).append(float(row["training loss"]))
    return curves


def draw(curves: dict[str, dict[int, list[float]]], source: str) -> str:
    """Return the picture. The lines lie upon each other: each is thinner than the one below."""
    seeds = len(next(iter(curves["fp32"].values())))
    title = f"Training loss of a GPT in nats per byte, {seeds} seeds: fp16 and compact fp16 lie on fp32"
    shapes = [svg.text(0, svg.SIZE, "Training loss, nats per byte, mean of ten steps", bold=True)]
    shapes += svg.bands(curves, svg.Axes(LOSSES, 100, right=16), STROKES, named=False)
    foot = svg.TOP + svg.HEIGHT + 38
    shapes.append(svg.text(svg.LEFT, foot, f"step; line: mean of {seeds} seeds, band: lowest to highest", size=12))
    names, foot = svg.legend([(name, colour) for name, (colour, _) in STROKES.items()], foot + 10)
    return svg.picture(title, [*shapes, *names], foot, source)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the points")
    parser.add_argument("--out", type=Path, default=OUT, help="the picture")
    given = parser.parse_args(arguments)
    given.out.write_text(draw(read_curves(given.results), f"{given.results.name} {digest(given.results)}"))
    print(given.out)


if __name__ == "__main__":
    main()
