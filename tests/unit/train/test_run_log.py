"""metrics.csv of a run that was killed, perhaps more than once."""

import csv
from pathlib import Path

from megascale.train.config import TrainConfig, load_config
from megascale.train.run_log import COLUMNS, RunLog, keep_overflows_before


def _config(folder: Path) -> TrainConfig:
    return load_config([f"output_dir={folder}", "wandb_name=run"])


def _write(log: RunLog, steps: range) -> None:
    for step in steps:
        log.write(dict(zip(COLUMNS, (step, 1.0, 0.5, 0.5, 1.0, 1.0, 65536.0, 0, 0.1, 0.01, 100.0), strict=True)))


def _steps(folder: Path) -> list[str]:
    with open(folder / "run" / "metrics.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert all(tuple(row) == COLUMNS and None not in row.values() for row in rows)
    return [row["step"] for row in rows]


def test_killed_again_before_it_saved(tmp_path: Path) -> None:
    """A run that goes on and is killed before it saves has lost no row of before."""
    log = RunLog(_config(tmp_path), 0)
    _write(log, range(5))
    log.close()
    killed = RunLog(_config(tmp_path), 5)
    _write(killed, range(5, 7))
    assert _steps(tmp_path) == [str(step) for step in range(7)]
    # The third run resumes where the second did.
    last = RunLog(_config(tmp_path), 5)
    _write(last, range(5, 8))
    last.close()
    assert _steps(tmp_path) == [str(step) for step in range(8)]
    killed.close()


def test_overflows_of_steps_that_run_again_are_removed(tmp_path: Path) -> None:
    """Rows from the first step that runs again are gone, and so is a line that a kill cut short."""
    path = tmp_path / "overflows.jsonl"
    keep_overflows_before(path, 3)
    assert not path.exists()
    rows = [f'{{"step": {step}, "parameter": "w"}}\n' for step in (0, 2, 2, 3, 11)]
    path.write_text("".join(rows) + '{"step": 1')
    keep_overflows_before(path, 3)
    assert path.read_text() == "".join(rows[:3])
