"""``python -m megascale.train.experiment``: what loss scaling does for fp16, as a table and a picture.

Four runs beside one in fp32, over several seeds:

    python -m megascale.train.experiment [seeds=0,1,2] [folder=runs/scaling_experiment] [a.b=c ...]

Every run is the command that its row shows, in a process of its own. Further arguments go to all of them; see
``python -m megascale.train --help``. A run that is done already is not run again. ``figure.svg`` needs matplotlib.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megascale.errors import ArgumentError, RunError
from megascale.utils.program import run_program

RUNS: dict[str, tuple[str, ...]] = {
    "fp32": ("precision=fp32", "scaler.scaler_type=none"),
    "no_scaling": ("scaler.scaler_type=static", "scaler.scale=1"),
    "static_scaling_65536": ("scaler.scaler_type=static", "scaler.scale=65536"),
    "dynamic_scaling_65536": ("scaler.scaler_type=dynamic", "scaler.scale=65536"),
    "dynamic_scaling_4294967296": ("scaler.scaler_type=dynamic", "scaler.scale=4294967296"),
}
OWN_KEYS = ("seed", "wandb_name", "output_dir", "precision", "scaler.scaler_type", "scaler.scale")
"""Keys that the experiment itself gives to each run."""

GREY = "#808080"
"""Letters and axes, which white and black pages both show."""
LINES = {
    "fp32": ("fp32", GREY, 3.0),
    "no_scaling": ("fp16 without scaling", "#D55E00", 1.5),
    "dynamic_scaling_65536": ("fp16 with megascale", "#1F83C4", 1.5),
    "dynamic_scaling_4294967296": ("the same from 2^32", "#2A9D74", 1.2),
}
"""Name, colour and width of each run of the picture. Those behind come first."""
Outcome = dict[str, Any]
"""A run's summary.json, with ``run``, ``seed``, and ``skipped_first``: steps skipped before the first that landed."""


def command(run: str, seed: int, folder: Path, extra: Sequence[str]) -> list[str]:
    """Return the arguments of ``python`` for one run."""
    given = [f"wandb_name={run}", f"seed={seed}", f"output_dir={folder / f'seed_{seed}'}"]
    return ["-m", "megascale.train", *RUNS[run], *given, *extra]


def columns(run: str, seed: int, folder: Path) -> Any:
    """Return what a run logged, as a structured array with a field for each column of its metrics.csv."""
    return np.atleast_1d(np.genfromtxt(folder / f"seed_{seed}" / run / "metrics.csv", delimiter=",", names=True))


def outcome(run: str, seed: int, folder: Path) -> Outcome:
    """Read what a run left in its folder."""
    summary = json.loads((folder / f"seed_{seed}" / run / "summary.json").read_text(encoding="utf-8"))
    landed = np.flatnonzero(columns(run, seed, folder)["skipped"] == 0)
    return summary | {"run": run, "seed": seed, "skipped_first": int(landed[0]) if len(landed) else summary["skipped"]}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with a row for each run and seed."""
    rows = [
        f"| `{one['run']}` | {one['seed']} | {one['total_accuracy']:.4f} | {one['zero_grad_fraction']:.1%} | "
        f"{one['skipped']} | {one['skipped_first']} | {one['scale']:.4g} | {one['seconds']:.0f} |"
        for one in sorted(outcomes, key=lambda one: [*RUNS].index(one["run"]))
    ]
    return "\n".join(
        [
            "| run | seed | held-out accuracy | zero gradients | skipped | at the start | last scale | seconds |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def program(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Exit status: 0 done, 1 a failure, 2 bad arguments."""
    return run_program(main, arguments, prefix="megascale.train.experiment", statuses={ArgumentError: 2})


def main(arguments: list[str]) -> int:
    """Run all runs that are not done, and write ``results.md`` and ``figure.svg`` into the folder.

    Raises:
        ArgumentError: an argument is not understood, or would change what makes the runs differ.
        RunError: a run failed.
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        print((__doc__ or "").replace("``", ""))
        return 0
    seeds, folder, extra = _parse(arguments)
    outcomes: list[Outcome] = []
    for seed in seeds:
        for run in RUNS:
            line = command(run, seed, folder, extra)
            print("+ python " + " ".join(line), flush=True)
            if status := subprocess.run([sys.executable, *line]).returncode:
                raise RunError(f"the run {run} with seed {seed} ended with status {status}; its output says why")
            outcomes.append(outcome(run, seed, folder))
            (folder / "results.md").write_text(table(outcomes), encoding="utf-8")
    print(table(outcomes), end="")
    draw(seeds, folder)
    print(f"{folder / 'figure.svg'} shows the loss and the loss scale, step by step")
    return 0


def draw(seeds: Sequence[int], folder: Path) -> None:
    """Write ``figure.svg``: loss above loss scale, one colour for each run, one line for each of its seeds."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        **{"svg.fonttype": "none", "svg.hashsalt": "megascale", "axes.edgecolor": GREY, "grid.alpha": 0.3},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.titlelocation": "left"},
    }
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    style |= dict.fromkeys(
        # Points: no line is thinner.
        ("axes.linewidth", "grid.linewidth", "xtick.major.width", "ytick.major.width", "ytick.minor.width"),
        1.0,
    )
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.2, 5.0), layout="constrained")
        loss, scale = figure.subplots(2, 1, sharex=True)
        # matplotlib's own numbers have exponents that are too small to read.
        forms = ((loss, "loss", 10, "{x:g}"), (scale, "loss scale", 2, lambda value, _: f"2^{math.log2(value):g}"))
        for axes, title, base, form in forms:
            axes.set_title(title)
            axes.set_yscale("log", base=base)
            axes.yaxis.set_major_formatter(form)
        for run, (name, colour, width) in LINES.items():
            for index, seed in enumerate(seeds):
                found = columns(run, seed, folder)
                finite = found[np.isfinite(found["loss"])]
                spans = [span for span in np.array_split(finite, 80) if len(span)]  # a point each: the mean
                at = ([span[column].mean() for span in spans] for column in ("step", "loss"))
                loss.plot(*at, color=colour, linewidth=width, label=None if index else name)
                if run != "fp32":
                    moved = found[[True, *(np.diff(found["scale"][:-1]) != 0), True][: len(found)]]
                    scale.step(moved["step"], moved["scale"], where="post", color=colour, linewidth=width)
        loss.legend(frameon=False)
        scale.set_xlabel("step")
        figure.savefig(folder / "figure.svg", transparent=True, metadata={"Date": None, "Creator": None})


def _parse(arguments: Sequence[str]) -> tuple[list[int], Path, list[str]]:
    given, extra = {"seeds": "0,1,2", "folder": "runs/scaling_experiment"}, []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator:
            raise ArgumentError(f"argument {argument!r} is not of the form key=value, e.g. seeds=0,1,2")
        if name in OWN_KEYS:
            raise ArgumentError(
                f"{name} is set by the experiment itself, for each run; give seeds= and folder= instead"
            )
        if name in given:
            given[name] = value
        else:
            extra.append(argument)
    seeds = given["seeds"].split(",")
    if not all(seed.isdecimal() for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ArgumentError(f"seeds must be different integers with commas between, got {given['seeds']!r}, e.g. 0,1,2")
    return [int(seed) for seed in seeds], Path(given["folder"]), extra


if __name__ == "__main__":
    sys.exit(program())
