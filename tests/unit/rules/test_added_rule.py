"""The page that says how to add an optimizer rule is complete: added to a copy of the library, its code works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/own_optimizer.md").read_text()
BLOCKS = dict(re.findall(r'^```py title="(.+?)"\n(.*?)^```', PAGE, flags=re.DOTALL | re.MULTILINE))
RULE, RULES = "megascale/rules/rmsprop.py", "megascale/rules/__init__.py"
REFERENCE = "megascale/kernels/reference.py"
TEST = "tests/unit/rules/test_rmsprop.py"


def _change(path: Path, pattern: str, new: str) -> None:
    """Replace the only place that ``pattern`` matches."""
    text, changed = re.subn(pattern, lambda _: new, path.read_text(), flags=re.MULTILINE)
    assert changed == 1, (path, pattern)
    path.write_text(text)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library with RMSprop, as the page says."""
    folder = tmp_path_factory.mktemp("added")
    shutil.copytree(ROOT / "megascale", folder / "megascale", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / RULE).write_text(BLOCKS[RULE])
    imported, rules = BLOCKS[RULES].strip().split("\n\n")
    _change(folder / RULES, r"^from megascale\.rules\.rule ", f"{imported}\nfrom megascale.rules.rule ")
    _change(folder / RULES, r"^RULES: .*$", rules)
    _change(
        folder / REFERENCE,
        "^from megascale.rules import (.*)$",
        "from megascale.rules import AdamHyper, Hyper, LionHyper, SgdHyper\n"
        "from megascale.rules.rmsprop import RMSpropHyper",
    )
    _change(folder / REFERENCE, r"^Backend = ", BLOCKS[REFERENCE] + "\n\nBackend = ")
    (folder / Path(TEST).name).write_text(BLOCKS[TEST])
    shutil.copy(ROOT / "tests/unit/rules/test_rules.py", folder)
    return folder


def test_the_page_names_what_a_new_rule_needs(copied: Path) -> None:
    """Of the library only the files that the page lists have changed, and all files that it names are there."""
    changed = {
        str(path.relative_to(copied))
        for path in (copied / "megascale").rglob("*.py")
        if not (ROOT / path.relative_to(copied)).exists()
        or path.read_text() != (ROOT / path.relative_to(copied)).read_text()
    }
    assert changed == {RULE, RULES, REFERENCE}
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ") and "`" in line.split("|")[1]]
    named = {name for row in rows for name in re.findall(r"`([\w/]+/[\w/]+\.\w+)`", row)}
    assert changed | {TEST} <= named
    kernels = {f"megascale/kernels/{name}" for name in named if name.startswith(("native/", "triton/"))}
    others = {name for name in named if not name.startswith(("native/", "triton/"))} - {RULE, TEST}
    assert [name for name in kernels | others if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_the_page_s_rule_passes_its_tests(copied: Path) -> None:
    """The page's own test, and those of every rule, run in the copy: nothing else of the library had to change."""
    variables = os.environ | {"PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1"}
    options = ["-v", "--noconftest", "-p", "no:cacheprovider", f"--rootdir={copied}", "-k", "rmsprop or table"]
    command = [sys.executable, "-m", "pytest", *options, str(copied)]
    done = subprocess.run(command, cwd=copied, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "test_the_reference_has_every_kernel[rmsprop] PASSED" in done.stdout
    assert "test_rmsprop.py::test_a_skipped_step_changes_no_bit PASSED" in done.stdout
