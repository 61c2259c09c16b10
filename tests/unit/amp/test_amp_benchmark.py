"""benchmarks/amp.py at a tiny size: the table is whole. Nothing here looks at times."""

import csv
from pathlib import Path

import pytest

from tests.unit.test_benchmarks import run, table

TORCH = "unscale_, clip_grad_norm_, step, update"


@pytest.mark.release
def test_amp_writes_whole_table_and_rounds(tmp_path: Path) -> None:
    """One command: torch's loop and ours on equal tensors, no host reads, the same bits without the helper."""
    text = run("amp.py", "--out", str(tmp_path / "amp.md"))
    assert (tmp_path / "amp.md").read_text().strip() == text.strip()
    rows = {row["end of an iteration"]: row for row in table(text)}
    helped = "megascale: optimizer_step(max_gradient_norm=1)"
    plain = ["torch: step, update", "megascale: step, update", f"torch: {TORCH}", f"megascale: {TORCH}"]
    assert list(rows) == [*plain, helped]
    for name, row in rows.items():
        assert row["host reads"] == "0"
        assert float(row["median ms"]) > 0
        assert (row["asked for"] == "-") == name.startswith("torch")
        if name.startswith("megascale"):
            assert float(row["of torch's (median of rounds)"]) > 0
            assert float(row["difference"]) <= (1e-6 if name == helped else 0.0)
    assert rows[helped]["bytes / parameter"] == "32"
    assert rows[plain[2]]["bytes / parameter"] == "48"
    with (tmp_path / "amp.csv").open() as file:
        assert [(row["contender"], row["round"]) for row in csv.DictReader(file)] == [
            (name, index) for name in rows for index in "01"
        ]
