"""benchmarks/results/frameworks.md: each cell is a test that exists, a refusal or "not tested" with its reason."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "benchmarks/results/frameworks.md"
WHAT = ["fp16", "bf16", "DDP", "FSDP2", "resume here", "resume elsewhere", "LoRA", "8-bit"]
FRAMEWORKS = [
    "transformers Trainer",
    "TRL SFT",
    "TRL GRPO",
    "Accelerate",
    "axolotl",
    "Lightning",
    "verl",
    "torchtitan",
    "Megatron",
    "A loop with FSDP2",
    "nanochat",
]


def _tables() -> dict[str, dict[str, str]]:
    """Return the cells of each framework's table."""
    _, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    rows = {
        section.splitlines()[0]: re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE) for section in sections
    }
    return {name: dict(found[1:]) for name, found in rows.items()}


def problem(cell: str) -> str | None:
    """Return what is wrong with a cell, or None."""
    named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", cell)
    if not named and not re.match(r"(refused|not tested): .{10,}", cell):
        return f"{cell!r} names no test, and gives no reason"
    for file, test in named:
        paths = list(TESTS.rglob(f"{file}.py"))
        if not any(test in _functions(path) for path in paths):
            return f"no {file}.py under tests/ has {test}"
    return None


def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_cell_is_a_test_or_a_reason() -> None:
    """A test that is renamed or removed leaves no promise behind."""
    tables = _tables()
    assert list(tables) == FRAMEWORKS
    for name, cells in tables.items():
        assert list(cells) == WHAT, name
        assert {what: found for what, cell in cells.items() if (found := problem(cell))} == {}, name
