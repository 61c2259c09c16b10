"""The pages of docs/ keep their promises: every Python example runs as pasted, alone.

The first of each page runs in a fresh interpreter; the others in processes forked from one that has imported torch,
which takes as long as ten of them, and once a week in fresh ones too.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.pool import start_context

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
OPTIONAL = (
    "accelerate",
    "axolotl",
    "datasets",
    "deepspeed",
    "lightning",
    "megatron",
    "pytorch_lightning",
    "torchtitan",
    "transformers",
    "trl",
    "verl",
)
SECONDS = 240.0
OUTPUT = "output"


def _examples() -> list[tuple[str, str]]:
    """Return (page and number, code) of every Python block."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [(f"{page.stem}-{index}", code) for index, code in enumerate(blocks)]
    return found


def _libraries(code: str) -> list[str]:
    """Return those of OPTIONAL that ``code`` imports without a guard."""
    names: set[str] = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
            if node.module.startswith("megascale.integrations."):
                names.add(node.module.split(".")[2])
    return [name for name in OPTIONAL if name in names]


def _run_fresh(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def _run_forked(code: str, folder: Path) -> None:
    process = start_context().Process(target=_main, args=(code, folder))
    process.start()
    process.join(SECONDS)
    process.kill()
    assert process.exitcode == 0, (folder / OUTPUT).read_text()


def _main(code: str, folder: Path) -> None:
    """Run an example as the program of this process."""
    with (folder / OUTPUT).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    sys.modules["__main__"] = program = ModuleType("__main__")
    exec(compile(code, "example", "exec"), program.__dict__)


def _params(chosen: Callable[[str, str], bool]) -> list[Any]:
    """Return the examples that ``chosen(where, code)`` is true of, for ``parametrize``."""
    return [pytest.param(code, id=where) for where, code in _examples() if chosen(where, code)]


EXAMPLES = _params(lambda _, code: not _libraries(code))


@pytest.mark.slow
@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_as_pasted(code: str, tmp_path: Path) -> None:
    """Every example runs, in an empty folder, where torch and megascale have been imported."""
    _run_forked(code, tmp_path)


@pytest.mark.release
@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_in_a_fresh_interpreter(code: str, tmp_path: Path) -> None:
    """An example imports all that it needs."""
    _run_fresh(code, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("code", _params(lambda where, code: bool(_libraries(code))))
def test_example_of_a_library_runs_as_pasted(code: str, tmp_path: Path) -> None:
    """So does each that needs another library, in a fresh interpreter, wherever that is installed."""
    missing = [name for name in _libraries(code) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    _run_fresh(code, tmp_path)


def test_links_lead_somewhere() -> None:
    """Every relative link of the pages at the top and in docs/ names a file, or the page made of the source."""
    for page in (*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert target == "messages.md" or (page.parent / target).exists(), f"{page.name}: {target}"
