"""The pages of docs/ keep their promises: every Python example runs as pasted, in a fresh interpreter, alone."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITHOUT_EXAMPLES = ("architecture", "benchmarks", "changes", "glossary", "invariants", "training")
OPTIONAL = ("accelerate", "datasets", "deepspeed", "lightning", "megatron", "pytorch_lightning", "transformers")


def _examples() -> list[tuple[str, str]]:
    """Return (page and number, code) of every Python block."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [(f"{page.stem}-{index}", code) for index, code in enumerate(blocks)]
    return found


def _imported(code: str) -> set[str]:
    """Return the libraries that ``code`` imports without a guard, by their top-level names."""
    names: set[str] = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
            if node.module.startswith("megascale.integrations."):
                names.add(node.module.split(".")[2])
    return names


@pytest.mark.slow
@pytest.mark.parametrize("code", [pytest.param(code, id=where) for where, code in _examples()])
def test_example_runs_as_pasted(code: str, tmp_path: Path) -> None:
    """Every example of a page runs alone, in an empty folder, wherever the library it is about is installed."""
    missing = [name for name in OPTIONAL if name in _imported(code) and importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_pages_have_examples() -> None:
    """A page without a running example is one of those that are not about use."""
    examples = [where for where, _ in _examples()]
    for page in PAGES:
        has_examples = any(where.startswith(f"{page.stem}-") for where in examples)
        assert has_examples != (page.stem in WITHOUT_EXAMPLES), page.name


def test_links_lead_somewhere() -> None:
    """Every relative link of the pages at the top and of those in docs/ names a file that is there."""
    for page in (*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
