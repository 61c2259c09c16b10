"""``python -m megascale.train.experiment``: what loss scaling does for fp16, as a table and a picture.

Four runs beside one in fp32, over several seeds:

    python -m megascale.train.experiment [seeds=0,1,2] [folder=runs/scaling_experiment] [a.b=c ...]

Every run is the command that its row shows, in a process of its own. Further arguments go to all of them; see
``python -m megascale.train --help``. A run that is done already is not run again. ``figure.svg`` needs matplotlib.
"""

import csv
import json
import math
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megascale.errors import ArgumentError, RunError
from megascale.train.rows import STEP, TABLE, parsed, rows_before
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


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    run: str
    seed: int
    total_accuracy: float
    skipped: int
    skipped_first: int
    """Steps skipped before the first one landed."""
    zero_grad_fraction: float
    """Mean over all steps."""
    scale: float
    """At the end."""
    seconds: float


def command(run: str, seed: int, folder: Path, extra: Sequence[str]) -> list[str]:
    """Return the arguments of ``python`` for one run."""
    return [
        "-m",
        "megascale.train",
        *RUNS[run],
        f"wandb_name={run}",
        f"seed={seed}",
        f"output_dir={folder / f'seed_{seed}'}",
        *extra,
    ]


def outcome(run: str, seed: int, folder: Path) -> Outcome:
    """Read what a run left in its folder."""
    place = folder / f"seed_{seed}" / run
    summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
    skipped = [parsed(row)["skipped"] == 1 for row in rows_before(place / TABLE, None)]
    return Outcome(
        run,
        seed,
        summary["total_accuracy"],
        summary["skipped"],
        skipped.index(False) if False in skipped else len(skipped),
        summary["zero_grad_fraction"],
        summary["scale"],
        summary["seconds"],
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table: one row per run, means with the lowest and highest value over the seeds."""
    lines = [
        "| run | held-out accuracy: mean (min to max) | zero gradients | skipped | at the start | last scale |",
        "|---|---|---|---|---|---|",
    ]
    for run in RUNS:
        mine = [one for one in outcomes if one.run == run]
        if not mine:
            continue
        accuracies = [one.total_accuracy for one in mine]
        cells = [
            f"`{run}`",
            f"{_mean(accuracies):.4f} ({min(accuracies):.4f} to {max(accuracies):.4f})",
            f"{_mean([one.zero_grad_fraction for one in mine]):.1%}",
            _span([one.skipped for one in mine]),
            _span([one.skipped_first for one in mine]),
            _span([one.scale for one in mine]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(outcomes: Sequence[Outcome], arguments: Sequence[str]) -> str:
    """Return a Markdown page: command, machine, table, and every run."""
    typed = " ".join(["python -m megascale.train.experiment", *arguments])
    lines = [
        "# What loss scaling does for fp16",
        "",
        f"`{typed}`",
        "",
        f"{_machine()}, torch {torch.__version__}, Python {platform.python_version()}. Each row is "
        "`python -m megascale.train` with",
        "",
        *(f"- `{' '.join([*options, f'wandb_name={run}'])}`" for run, options in RUNS.items()),
        "",
        table(outcomes),
        "",
        "| run | seed | held-out accuracy | zero gradients | skipped | at the start | last scale | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{one.run}` | {one.seed} | {one.total_accuracy:.4f} | {one.zero_grad_fraction:.1%} | {one.skipped} "
        f"| {one.skipped_first} | {one.scale:.7g} | {one.seconds:.0f} |"
        for one in outcomes
    ]
    return "\n".join(lines) + "\n"


def program(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Exit status: 0 done, 1 a failure, 2 bad arguments."""
    return run_program(main, arguments, prefix="megascale.train.experiment", statuses={ArgumentError: 2})


def main(arguments: list[str]) -> int:
    """Run all runs that are not done, and write ``results.md``, ``results.csv`` and ``figure.svg`` into the folder.

    Raises:
        ArgumentError: an argument is not understood, or would change what makes the runs differ.
        RunError: a run failed.
    """
    if any(argument in ("-h", "--help") for argument in arguments):
        print((__doc__ or "").replace("``", ""))
        return 0
    seeds, folder, extra = _parse(arguments)
    outcomes: list[Outcome] = []
    for seed in seeds:
        for run in RUNS:
            line = command(run, seed, folder, extra)
            print("+ python " + " ".join(line), flush=True)
            status = subprocess.run([sys.executable, *line]).returncode
            if status:
                raise RunError(f"the run {run} with seed {seed} ended with status {status}; its output says why")
            outcomes.append(outcome(run, seed, folder))
            _write(outcomes, folder, arguments)
    print(table(outcomes))
    draw(seeds, folder)
    print(f"{folder / 'figure.svg'} shows the loss and the loss scale, step by step")
    return 0


def draw(seeds: Sequence[int], folder: Path) -> None:
    """Write ``figure.svg``: one colour for each run, one line for each of its seeds."""
    from megascale.train.experiment_picture import write_svg  # needs matplotlib

    runs = {}
    for run in RUNS:
        tables = [rows_before(folder / f"seed_{seed}" / run / TABLE, None) for seed in seeds]
        runs[run] = [
            {name: np.array([parsed(row).get(name, math.nan) for row in rows]) for name in (STEP, "loss", "scale")}
            for rows in tables
        ]
    write_svg(runs, folder / "figure.svg")


def _write(outcomes: Sequence[Outcome], folder: Path, arguments: Sequence[str]) -> None:
    (folder / "results.md").write_text(report(outcomes, arguments), encoding="utf-8")
    with open(folder / "results.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(vars(outcomes[0])))
        writer.writeheader()
        writer.writerows(vars(one) for one in outcomes)


def _parse(arguments: Sequence[str]) -> tuple[list[int], Path, list[str]]:
    seeds, folder, extra = "0,1,2", "runs/scaling_experiment", []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator:
            raise ArgumentError(f"argument {argument!r} is not of the form key=value, e.g. seeds=0,1,2")
        if name in OWN_KEYS:
            raise ArgumentError(
                f"{name} is set by the experiment itself, for each run; give seeds= and folder= instead"
            )
        if name == "seeds":
            seeds = value
        elif name == "folder":
            folder = value
        else:
            extra.append(argument)
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ArgumentError(f"seeds must be integers with commas between, got {seeds!r}, e.g. seeds=0,1,2") from None
    if len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise ArgumentError(f"seeds must be different integers, 0 or more, got {seeds!r}")
    return numbers, Path(folder), extra


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return f"{platform.system()} {platform.machine()}, {device}"


if __name__ == "__main__":
    sys.exit(program())
