"""README.md keeps its promises: its examples run as pasted, its commands are where CI looks for them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


OPTIONAL = [
    *("omegaconf", "sklearn", "tqdm", "tensorboard", "wandb", "triton", "matplotlib"),
    *("lightning", "accelerate", "transformers", "megatron", "deepspeed"),
    *("amp_C", "apex", "transformer_engine", "megascale.kernels.apex_backend"),
    *("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", "sympy"),  # slow
]
IMPORT = (
    "import sys, torch; before = set(sys.modules); import megascale.kernels; "
    f"print([m for m in {OPTIONAL} if m in sys.modules and m not in before])"
)


def _run(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(_blocks("python"))))
def test_example_runs_as_pasted(index: int, tmp_path: Path) -> None:
    """Every Python example of the page runs in a fresh interpreter, alone."""
    assert _run(_blocks("python")[index], tmp_path).startswith("loss ")


def test_commands_stand_where_they_are_looked_for() -> None:
    """First bash block: the main job on 2 ranks. Second: the tests. Each in an environment of the clone's own."""
    job, tests = _blocks("bash")[:2]
    assert "-m venv .venv" in job
    assert "--nproc-per-node 2 -m megascale.train" in job
    assert "-m venv .venv" in tests
    assert "-m pytest" in tests


def test_every_line_of_what_is_checked_is_a_test() -> None:
    """The table of docs/invariants.md names, for each line, the test that holds it. README.md leads to it."""
    assert "(docs/invariants.md#what-is-checked)" in README.read_text()
    section = (README.parent / "docs/invariants.md").read_text().split("## What is checked\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 40
    tests = "\n".join(path.read_text() for path in README.parent.glob("tests/**/test_*.py"))
    for row in rows:
        named = re.fullmatch(r"\|.*\| `(test_\w+)` \|", row)
        assert named is not None, row
        assert f"def {named[1]}(" in tests, row


def test_core_imports_nothing_optional(tmp_path: Path) -> None:
    """`import megascale` brings no optional library, no backend that needs one, and no slow part of torch."""
    assert _run(IMPORT, tmp_path) == "[]\n"
