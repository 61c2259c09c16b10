"""The benchmarks of the step at tiny sizes: the tables are whole. Nothing here looks at times."""

import ast
import csv
import importlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.kernels.native import levels

ROOT = Path(__file__).parents[2]
SECONDS = 280
"""How long a program is waited for: it may compile first, beside another process of tests; below pytest's limit."""
TINY = ("--threads", "1", "--device", "cpu", "--probe", "10000", "--rounds", "2", "--numel", "9999")


def run(program: str, *arguments: str) -> str:
    """Return what a benchmark prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / program), *arguments, *TINY]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def table(text: str) -> list[dict[str, str]]:
    """Return the rows of all Markdown tables, by the names of their columns."""
    rows: list[dict[str, str]] = []
    heads: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        elif not line.startswith("|---"):
            assert len(cells) == len(heads), line
            rows.append(dict(zip(heads, cells, strict=True)))
    return rows


@pytest.mark.release
def test_step_writes_whole_table_and_rounds(tmp_path: Path) -> None:
    """One command times all contenders on the same work; whoever cannot run has a row with the reason."""
    options = ("--backends", "reference,apex", "--only", "masters,torch amp,apex", "--out", str(tmp_path / "table.md"))
    text = run("step.py", "--tensors", "3", "--dtypes", "float16", *options)
    assert (tmp_path / "table.md").read_text().strip() == text.strip()
    rows = table(text)
    names = [row["step"].partition(" (")[0] for row in rows]
    expected = ["megascale", "megascale, reference", "megascale, apex", "masters", "torch amp", "apex FusedAdam"]
    assert names == expected
    for row, name in zip(rows, names, strict=True):
        if "apex" in name:
            assert "not " in row["median ms"]
            continue
        traffic = {"masters": "60", "torch amp": "48"}.get(name, "30")
        assert row["bytes / parameter"] == traffic
        assert row["host reads"] == ("1" if name == "masters" else "0")
        assert row["collectives"] == ("all_reduce 1" if name.startswith("megascale") else "none")
        assert float(row["difference"]) < 1.3e-4  # two of fp16's steps; seven updates of 1e-4 have been made
        held, peak = (float(number) for number in row["held, peak: bytes / parameter"].split(","))
        assert {"masters": 20, "torch amp": 16}.get(name, 16) == held <= peak
    with (tmp_path / "table.csv").open() as file:
        rounds = [(row["contender"], row["round"]) for row in csv.DictReader(file) if row["dtype"] == "float16"]
    assert rounds == [(name, index) for name in expected if "apex" not in name for index in "01"]


@pytest.mark.release
def test_matrix_times_every_rule_beside_adamw(tmp_path: Path) -> None:
    """One row for every rule, dtype and moments that it has; bytes are those that its step must move."""
    chosen = ("--rules", "masters,adamw,amsgrad,sgd,lion", "--moments", "float32,bfloat16,bfloat16/float32")
    options = ("--dtypes", "float16,float32", "--tensors", "3", "--out", str(tmp_path / "matrix.md"))
    text = run("step.py", "--matrix", *chosen, *options)
    assert (tmp_path / "matrix.md").read_text().strip() == text.strip()
    found = {tuple(row.values())[:3]: row for row in table(text)}
    moved = {
        ("adamw", "float32"): (30, 32),
        ("adamw", "bfloat16"): (22, 24),
        ("adamw", "bfloat16/float32"): (26, 28),
        ("amsgrad", "float32"): (38, 40),
        ("amsgrad", "bfloat16"): (26, 28),
        ("amsgrad", "bfloat16/float32"): (34, 36),
        ("sgd", "none"): (14, 16),
        ("lion", "float32"): (22, 24),
        ("lion", "bfloat16"): (18, 20),
    }
    dtypes = ("float16", "float32")
    expected = {(rule, d, m): str(n) for (rule, m), each in moved.items() for d, n in zip(dtypes, each, strict=True)}
    expected["masters", "float16", "float32"] = "60"
    assert {key: row["bytes / parameter"] for key, row in found.items()} == expected
    for (rule, dtype, _), row in found.items():
        beside_masters = row["time / masters'"]
        assert (beside_masters == "-") == (dtype == "float32")
        assert beside_masters == "1.00" or rule != "masters"
    with (tmp_path / "matrix.csv").open() as file:
        turns = [(row["rule"], row["dtype"], row["moments"], row["turn"]) for row in csv.DictReader(file)]
    assert turns == [(*key, str(turn)) for key in found for turn in range(6)]


@pytest.mark.release
def test_host_time_compares_checkouts(tmp_path: Path) -> None:
    """A row for every number of tensors, with gradients in place and moved; a column for each checkout."""
    out = tmp_path / "table.md"
    options = ["--tensors", "3,70", "--rounds", "1", "--threads", "1", "--before", str(ROOT), "--out", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "host_time.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.read_text()
    rows = table(done.stdout)
    assert [(row["tensors"], row["gradients"]) for row in rows] == [
        (count, kind) for count in ("3", "70") for kind in ("in place", "moved")
    ]
    for row in rows:
        for name in ("before", "here"):
            least, median = row[f"{name}: smallest ms (median)"].removesuffix(")").split(" (")
            assert 0 < float(least) <= float(median)


@pytest.mark.release
def test_slow_and_broken_contenders_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes longer than the limit, or fails, keeps a row with the reason, and the others go on."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    contenders, rounds, work = (importlib.import_module(f"peers.{name}") for name in ("contenders", "rounds", "work"))
    cpu = torch.device("cpu")
    broken = contenders.Entry("broken", "step_by_hand", "no_such_function")
    little, bandwidth = work.given_work(100, 2, torch.float16, cpu), rounds.Bandwidth(100, cpu)
    fine, failed = rounds.run_rounds([contenders.OURS, broken], little, 3, bandwidth, limit=60.0)
    assert len(fine.times) == len(fine.bandwidths) == 3
    assert failed.broken
    assert "no_such_function" in failed.failure
    (slow,) = rounds.run_rounds([contenders.OURS], little, 3, bandwidth, limit=1e-9)
    assert slow.failure.startswith("left out")
    assert not slow.broken
    assert not slow.times


def test_everybody_follows_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over as many rounds as there are contenders, each comes at every place once and after every other one once."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    order = importlib.import_module("peers.rounds").balanced_order
    rounds = [order(6, index) for index in range(6)]
    assert all(sorted(place) == list(range(6)) for place in zip(*rounds, strict=True))
    pairs = [pair for places in rounds for pair in itertools.pairwise(places)]
    assert sorted(pairs) == [(a, b) for a in range(6) for b in range(6) if a != b]
    assert (order(0, 0), order(1, 5), sorted(order(5, 7))) == ([], [0], list(range(5)))


@pytest.mark.release
def test_curves_compare_runs_of_one_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row per way of training, a point per ten steps of every run; all begin alike, and all learn."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    curve = importlib.import_module("curve")
    tiny = "--layers 1 --width 16 --heads 2 --context 8 --batch 2 --steps 40 --seeds 2 --validate 20 --device cpu"
    monkeypatch.setattr(sys, "argv", ["curve.py", *tiny.split(), "--out", str(tmp_path / "curve")])
    assert curve.main() == 0
    text = capsys.readouterr().out
    assert (tmp_path / "curve.md").read_text() == text
    assert [row[""] for row in table(text)] == ["fp32", "fp16", "compact"]
    with (tmp_path / "curve.csv").open() as file:
        points = list(csv.DictReader(file))
    assert len(points) == 3 * 2 * 4
    losses = {(point["way"], point["seed"], point["step"]): float(point["training loss"]) for point in points}
    for way in ("fp32", "fp16", "compact"):
        assert losses[way, "0", "40"] < losses[way, "0", "10"]
        assert abs(losses[way, "1", "10"] - losses["fp32", "1", "10"]) < 0.05


@pytest.mark.parametrize(
    ("program", "rounds", "picture"),
    [
        ("step", "step_cpu.csv", "step_benchmark.svg"),
        ("curve", "curve_cpu.csv", "training_curve.svg"),
    ],
)
def test_pictures_are_what_the_programs_draw(
    program: str, rounds: str, picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn again from the committed rounds they are the same; transparent, and they ask for no other file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made, drawn = tmp_path / picture, ROOT / "docs" / "assets" / picture
    given = str(ROOT / "benchmarks" / "results" / rounds)
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--draw", given, str(made)])
    importlib.import_module(program).main()
    text = made.read_text()
    assert text == drawn.read_text(), f"python benchmarks/{program}.py --draw {given} {drawn}"
    assert "href" not in text
    assert 'width="100%"' not in text  # no background


@pytest.mark.release
def test_overflow_report_has_a_row_for_each_dtype(tmp_path: Path) -> None:
    """Steps with and without reports of a tiny GPT, in each dtype of gradients."""
    out = tmp_path / "table.md"
    sizes = ("--width", "16", "--layers", "1", "--context", "8", "--batch", "2", "--rounds", "2", "--threads", "1")
    command = [sys.executable, str(ROOT / "benchmarks/overflow_report.py"), *sizes, "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["gradients"] for row in table(out.read_text())] == ["float16", "bfloat16"]


@pytest.mark.release
def test_checkpoint_benchmark_saves_all_ways(tmp_path: Path) -> None:
    """Every contender has a row, and ratios to torch.save and to another checkout's save."""
    out = tmp_path / "table.md"
    sizes = ["--numel", "1000", "--tensors", "3", "--rounds", "2", "--folder", str(tmp_path), "--out", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks/checkpoint.py"), *sizes, "--before", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    rows = table(out.read_text())
    assert len(rows) == 7
    for ratio, rival in (
        ("of torch.save's", "torch.save, fsync"),
        ("of the earlier commit's", "megascale, the earlier commit"),
    ):
        assert [row[ratio] for row in rows if row["save"] == rival] == ["1.00 (1.00 to 1.00)"]


@pytest.mark.release
def test_muon_benchmark_has_the_same_weights_by_hand(tmp_path: Path) -> None:
    """Every contender has a row, and ends with the parameters of torch's own Muon by hand."""
    out = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks/muon.py"), "--layers", "1", "--width", "16", "--rounds", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr
    rows = table(out.read_text())
    assert len(rows) == 5
    assert {row["difference"] for row in rows} == {"0"}


@pytest.mark.release
def test_certificate_compares_the_same_training(tmp_path: Path) -> None:
    """All states have a row for each task, and remainders end with the bits of fp32 states whose ties have moved."""
    out = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks/certificate.py"), "--precisions", "bf16", "--seeds", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = ["--set", "steps=20", "--out", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    rows = table(out.read_text())
    losses, weights = rows[:14], rows[14:]
    names = ["fp32 states", "remainders", "8-bit moments", "both", "no remainders", "torch's AdamW alone", "1 % off"]
    assert [row["states"] for row in losses] == 2 * names
    assert all(float(row["loss, seed 0"]) > 0 for row in losses)
    assert [row["from fp32 states, ties moved"] for row in weights] == ["0", "0"]


@pytest.mark.release
def test_two_checkouts_take_turns_with_all_states(tmp_path: Path) -> None:
    """Each rule, dtype and kind of states has a row; of SGD those that it has."""
    out = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks/against.py"), str(ROOT), "--numel", "8192", "--tensors", "2"]
    options = ["--rounds", "2", "--threads", "1", "--rules", "adamw,momentum", "--dtypes", "float16"]
    states = ["float32", "remainders", "codes", "compact"]
    chosen = ["--states", ",".join(states), "--out", str(out)]
    done = subprocess.run([*command, *options, *chosen], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert [(row["rule"], row["states"]) for row in table(out.read_text())] == [
        *(("adamw", kind) for kind in states),
        *(("momentum", kind) for kind in states[:2]),
    ]
    others = ["amp-step", "amp-clipped", "amp-optimizer_step", "replicated-2", "sharded-2"]
    options[options.index("adamw,momentum")] = ",".join(others)
    done = subprocess.run([*command, *options, "--out", str(out)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert [row["rule"] for row in table(out.read_text())] == others


@pytest.mark.release
def test_peers_of_8_bits_are_compared_with_ours(tmp_path: Path) -> None:
    """There is a row for each AdamW that is installed, and ratios are to ours."""
    out = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks/peers_8bit.py"), "--numel", "8192", "--tensors", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = ["--rounds", "2", "--threads", "1", "--out", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    rows = table(out.read_text())
    assert len(rows) >= 3
    assert rows[0]["ours, 8-bit moments / it"] == "1.00 (1.00 to 1.00)"


def test_a_number_above_its_ceiling_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a package that has no ceiling yet. Docstrings, comments and imports are no statements."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    structure: Any = importlib.import_module("structure")
    found = structure.above({"tests": 11, "step": 10, "new": 1}, {"tests": 10, "step": 10, "gone": 5})
    assert found == ["tests: 11, and its ceiling is 10", "new: 1, and its ceiling is 0"]
    source = '"""Text."""\nimport os\ndef f():\n    """Text."""\n    # why\n    if os: return (1,\n      2)\n'
    assert sum(map(structure.is_counted, ast.walk(ast.parse(source)))) == 3


@pytest.mark.slow
@pytest.mark.c_compiler
def test_benchmarks_print_the_backend_or_refuse(tmp_path: Path) -> None:
    """Times of torch's kernels would pass for native.c's: beside other sources the command to build it is all."""
    if not levels.levels_here():
        pytest.skip("no library is made for this kind of machine")
    copy = tmp_path / "clone"
    ignored = shutil.ignore_patterns("__pycache__", "results")
    for name in ("megascale", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    (copy / "setup.py").touch()
    command = [
        sys.executable,
        str(copy / "benchmarks/graph.py"),
        "--numel",
        "9",
        "--tensors",
        "1",
        "--backends",
        "torch",
    ]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert "megascale's backend: native (" in done.stderr
    with (copy / "megascale/kernels/native/native.c").open("a") as source:
        source.write("\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 1
    assert "older than its sources" in done.stderr
    assert f"pip install --no-deps -e {copy}" in done.stderr
