"""The benchmarks run at tiny sizes and write their tables. Nothing here looks at times."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.kernels.native import levels

ROOT = Path(__file__).parents[2]
SECONDS = 280
"""How long a program is waited for: it may compile first, beside another process of tests; below pytest's limit."""
STEP = "--tensors 3 --dtypes float16 --threads 1 --device cpu --probe 10000 --rounds 2 --numel 9999"
PAIR = f"{ROOT} --numel 8192 --tensors 2 --rounds 2 --threads 1 --dtypes float16"
TINY_GPT = "--layers 1 --width 16 --context 8 --batch 2"
RUNS = [
    f"step.py {STEP} --backends reference,apex --only masters,apex",
    f"step.py {STEP} --matrix --rules masters,adamw,amsgrad,sgd,lion --moments float32,bfloat16",
    "amp.py --threads 1 --device cpu --probe 10000 --rounds 2 --numel 9999",
    "loop.py --device cpu --numel 20000 --tensors 8 --tokens 32 --iterations 2 --rounds 2 --threads 1",
    "host_time.py --tensors 3 --rounds 1 --threads 1",
    f"overflow_report.py {TINY_GPT} --rounds 2 --threads 1",
    f"checkpoint.py --numel 1000 --tensors 3 --rounds 2 --before {ROOT}",
    "muon.py --layers 1 --width 16 --rounds 2",
    "certificate.py --precisions bf16 --seeds 0 --set steps=20",
    f"against.py {PAIR} --rules adamw,momentum",
    f"against.py {PAIR} --rules amp-step,sharded-2",
    "peers_8bit.py --numel 8192 --tensors 2 --rounds 2 --threads 1",
    f"curve.py {TINY_GPT} --heads 2 --steps 40 --seeds 2 --validate 20 --device cpu",
]


@pytest.mark.release
@pytest.mark.parametrize("line", RUNS)
def test_table_is_written(line: str, tmp_path: Path) -> None:
    """One command makes the table that a page or benchmarks/results has."""
    program, *arguments = line.split()
    command = [sys.executable, str(ROOT / "benchmarks" / program), *arguments, "--out", str(tmp_path / "table.md")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert any(tmp_path.iterdir())
    assert "\n|---|" in done.stdout


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
