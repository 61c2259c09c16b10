"""Count what a reader of the library must take in, and hold it against the ceilings of ceilings.json.

    python benchmarks/structure.py --before ../earlier --out benchmarks/results/structure.md
    python benchmarks/structure.py --check

Size is statements of Python, without docstrings and imports: comments and layout cost nothing, and dense lines gain
nothing. Files are those that git tracks. The core is the top level, step, main_params, grad_sync, state, kernels,
rules, utils and landed. ``--check``, a step of `.ci/run`, fails where a number is above its ceiling. A change that
needs more raises the ceiling with ``--write``, and says in its message what it takes away instead; one that takes less
lowers it.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import host_time

CEILINGS = Path(__file__).with_name("ceilings.json")
CORE = {"(top level)", "step", "main_params", "grad_sync", "state", "kernels", "rules", "utils", "landed"}
NATIVE = {".c", ".h", ".cpp"}
SHORT = 6
"""Lines below its first, under which a reader of a function jumps more than reads."""


def tracked(root: Path, *folders: str) -> list[Path]:
    """Return the source files of folders that git tracks and that are there."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", *folders], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = (root / name for name in listed)
    return [path for path in found if path.suffix in {".py", *NATIVE} and path.is_file()]


def is_counted(node: ast.AST) -> bool:
    """Return whether a node is a statement, and neither a docstring nor an import."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.stmt) and not is_text and not isinstance(node, ast.Import | ast.ImportFrom)


def place_of(path: Path, root: Path) -> str:
    """Return what a file is counted in: a package of megascale, "(top level)" of it, or a folder of the repository."""
    folder, *rest = path.relative_to(root).parts
    if rest == ["estimation.py"]:  # which steps nothing: a package of its own, outside of the core, until it was cut
        return "estimation"
    return folder if folder != "megascale" else rest[0] if len(rest) > 1 else "(top level)"


def num_exported(tree: ast.Module) -> int:
    """Return how many names the ``__all__`` of a module lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return len(ast.literal_eval(node.value))
    return 0


def measured(root: Path) -> dict[str, int]:
    """Return all rows of one checkout."""
    statements, names, short, fields, lines_of_c = Counter[str](), 0, 0, 0, 0
    for path in tracked(root, "megascale", "tests", "benchmarks", "examples"):
        place = place_of(path, root)
        outside = place == path.relative_to(root).parts[0]
        if path.suffix in NATIVE:
            lines_of_c += 0 if outside else len(path.read_text().splitlines())
            continue
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        statements[place] += sum(map(is_counted, nodes))
        if outside:
            continue
        names += num_exported(tree) if path.name == "__init__.py" else 0
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        short += sum((node.end_lineno or 0) - node.lineno < SHORT for node in functions)
        if path == root / "megascale/config.py":  # OptimizerConfig and those that it extends
            classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
            fields = sum(isinstance(node, ast.AnnAssign) for each in classes for node in each.body)
    outside_of_package = {"tests", "benchmarks", "examples"}
    package = {name: count for name, count in statements.items() if name not in outside_of_package}
    frames, _, _ = host_time.turn(root, "count_frames()", 1)
    return {
        "statements: core": sum(count for name, count in package.items() if name in CORE),
        "statements: package": sum(package.values()),
        **{f"statements: {name}": statements[name] for name in sorted(package)},
        **{f"statements: {name}": statements[name] for name in sorted(outside_of_package)},
        "lines of C": lines_of_c,
        "names in __all__": names,
        "fields of OptimizerConfig": fields,
        "frames of the simplest step": frames,
        f"functions shorter than {SHORT} lines": short,
    }


def above(here: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    """Return a line for each number that is above its ceiling, or has none."""
    return [
        f"{name}: {number:,}, and its ceiling is {ceilings.get(name, 0):,}"
        for name, number in here.items()
        if number > ceilings.get(name, 0)
    ]


def main() -> None:
    """Print the table, or hold it against the ceilings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="fail where a number is above its ceiling")
    parser.add_argument("--write", action="store_true", help="make today's numbers the ceilings")
    args = parser.parse_args()
    here = measured(host_time.ROOT)
    if args.write:
        CEILINGS.write_text(json.dumps(here, indent=1) + "\n")
    if args.check:
        found = above(here, json.loads(CEILINGS.read_text()))
        print("\n".join(found) or "no number is above its ceiling")
        sys.exit(bool(found))
    before = {} if args.before is None else measured(args.before.resolve())
    lines = ["| | before | here |", "|---|---|---|"]
    for name in {**here, **before}:
        lines.append(f"| {name} | " + " | ".join(f"{of[name]:,}" if name in of else "" for of in (before, here)) + " |")
    print("\n".join(lines))
    if args.out is not None:
        command = "python benchmarks/structure.py --before ../earlier --out benchmarks/results/structure.md"
        args.out.write_text(f"# What a reader must take in\n\n`{command}`\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
