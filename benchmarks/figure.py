"""Draw the committed tables of the step and of its growth with the number of tensors.

    python benchmarks/figure.py

Reads every round of benchmarks/results/step_cpu.csv and growth_cpu.csv, writes docs/assets/step_benchmark.png and
growth_benchmark.png. Each picture names the digest of the rounds it was drawn from, so that a test finds an old one.
"""

import argparse
import csv
import hashlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = {"step_cpu.csv": "step_benchmark.png", "growth_cpu.csv": "growth_benchmark.png"}
OURS, PEERS = "#0072B2", "#999999"

Times = dict[str, list[float]]
"""Milliseconds of every round, by contender."""


def read_times(path: Path) -> dict[str, Times]:
    """Return the rounds' times by dtype and contender, in the file's order."""
    times: dict[str, Times] = {}
    with open(path, newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            times.setdefault(row["dtype"], {}).setdefault(row["contender"], []).append(float(row["ms"]))
    return times


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw(panels: Mapping[str, Times], path: Path, source: str) -> None:
    """Write a PNG with one panel of bars for each of ``panels``: medians, with lines from minimum to maximum."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = max(len(times) for times in panels.values())
    size = (10, 1.1 + 0.38 * rows)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, sharex=True, sharey=True, squeeze=False)
    for axis, (title, times) in zip(axes.flat, panels.items(), strict=True):
        medians = [statistics.median(rounds) for rounds in times.values()]
        low = [median - min(rounds) for median, rounds in zip(medians, times.values(), strict=True)]
        high = [max(rounds) - median for median, rounds in zip(medians, times.values(), strict=True)]
        names = list(times)
        colours = [OURS if name.startswith("megascale") else PEERS for name in names]
        axis.barh(names, medians, xerr=[low, high], color=colours, error_kw={"ecolor": "#444444", "elinewidth": 1})
        for place, (median, above) in enumerate(zip(medians, high, strict=True)):
            axis.text(median + above, place, f"  {median:.0f}", va="center", fontsize=8)
        axis.margins(x=0.1)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("ms a step: median, minimum and maximum", fontsize=9)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    axes.flat[0].invert_yaxis()  # shared: the first contender is on top
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Source": source})
    pyplot.close(figure)


def step_panels(times: Mapping[str, Times]) -> dict[str, Times]:
    """Return one panel for each dtype."""
    return {f"one step, 50M {dtype} parameters in 200 tensors": kept for dtype, kept in times.items()}


def growth_panels(times: Mapping[str, Times]) -> dict[str, Times]:
    """Return one panel for each number of tensors, which ends the contenders' names."""
    panels: dict[str, Times] = {}
    for contender, rounds in next(iter(times.values())).items():
        name, _, tensors = contender.rpartition(", ")
        panels.setdefault(f"50M float16 parameters in {tensors}", {})[name] = rounds
    return panels


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the .csv files"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "assets", help="folder of the figures")
    options = parser.parse_args(arguments)
    for (rounds, figure), panels in zip(FIGURES.items(), (step_panels, growth_panels), strict=True):
        source = options.results / rounds
        draw(panels(read_times(source)), options.out / figure, f"{rounds} {digest(source)}")
        print(options.out / figure)


if __name__ == "__main__":
    main()
