"""The experiment's commands, what it reads from runs, and the table it prints."""

import json
import re
from pathlib import Path

import pytest

from megascale.errors import ArgumentError
from megascale.train.experiment import RUNS, command, main, outcome, table

TINY = ["task=text", "text.width=8", "text.layers=1", "text.heads=1", "text.context=8", "text.heldout_windows=4"]
TINY += ["steps=3", "batch_size=2", "threads=1", "optimizer.clip_grad=1", "optimizer.lr=0.1"]


def test_commands_are_the_documented_ones() -> None:
    """Each run is what a user would type, plus seed and folder."""
    assert command("dynamic_scaling_65536", 2, Path("runs/x"), ["steps=5"]) == [
        "-m",
        "megascale.train",
        "scaler.scaler_type=dynamic",
        "scaler.scale=65536",
        "wandb_name=dynamic_scaling_65536",
        "seed=2",
        "output_dir=runs/x/seed_2",
        "steps=5",
    ]
    assert RUNS["no_scaling"] == ("scaler.scaler_type=static", "scaler.scale=1")


def _leave(folder: Path, run: str, seed: int, accuracy: float, skipped: list[int]) -> None:
    place = folder / f"seed_{seed}" / run
    place.mkdir(parents=True)
    summary = {"total_accuracy": accuracy, "skipped": sum(skipped), "zero_grad_fraction": 0.25, "scale": 2.0**seed}
    (place / "summary.json").write_text(json.dumps(summary | {"seconds": 1.0}))
    rows = "".join(f"{step},{flag}\n" for step, flag in enumerate(skipped))
    (place / "metrics.csv").write_text(f"step,skipped\n{rows}")


def test_table_has_a_row_for_each_run_and_seed(tmp_path: Path) -> None:
    """Skipped steps at the start are counted apart from later ones; a run that only skips is counted whole."""
    _leave(tmp_path, "dynamic_scaling_4294967296", 0, 0.96, [1, 1, 0, 1])
    _leave(tmp_path, "no_scaling", 0, 0.5, [0, 0, 1])
    _leave(tmp_path, "static_scaling_65536", 1, 0.1, [1, 1])
    outcomes = [outcome("dynamic_scaling_4294967296", 0, tmp_path), outcome("no_scaling", 0, tmp_path)]
    lines = table([*outcomes, outcome("static_scaling_65536", 1, tmp_path)]).splitlines()
    assert lines[2:] == [
        "| `no_scaling` | 0 | 0.5000 | 25.0% | 1 | 0 | 1 | 1 |",
        "| `static_scaling_65536` | 1 | 0.1000 | 25.0% | 2 | 2 | 2 | 1 |",
        "| `dynamic_scaling_4294967296` | 0 | 0.9600 | 25.0% | 3 | 2 | 1 | 1 |",
    ]


@pytest.mark.parametrize("seeds", ["", "0;1", "0,x", "0,,1"])
def test_bad_seeds_are_refused(seeds: str) -> None:
    """Seeds are integers with commas between."""
    with pytest.raises(ValueError, match="seeds must be different integers with commas between"):
        main([f"seeds={seeds}"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("seed=3", "seed is set by the experiment itself"),
        ("wandb_name=x", "wandb_name is set by the experiment itself"),
        ("scaler.scale=2", "scaler.scale is set by the experiment itself"),
        ("steps", "argument 'steps' is not of the form key=value"),
        ("seeds=1,1", "seeds must be different integers with commas between, got '1,1'"),
        ("seeds=-1", "seeds must be different integers with commas between, got '-1'"),
    ],
)
def test_arguments_that_would_mix_up_the_runs_are_refused(argument: str, message: str) -> None:
    """What the experiment itself gives to each run cannot be given to all; nothing is started."""
    with pytest.raises(ArgumentError, match=message):
        main([argument])


@pytest.mark.release
def test_experiment_runs_and_does_not_repeat_itself(tmp_path: Path) -> None:
    """Five runs per seed with the further options; a second call finds them done and writes the same results."""
    arguments = ["seeds=0", f"folder={tmp_path}", *TINY]
    assert main(arguments) == 0
    first = (tmp_path / "results.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| 0 ", first, re.MULTILINE) == list(RUNS)
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
    assert main(arguments) == 0
    assert (tmp_path / "results.md").read_text() == first
