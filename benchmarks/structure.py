"""Count what a reader of the library must take in: lines, files, frames of a step, names, arrows between packages.

    python benchmarks/structure.py --before ../earlier --out benchmarks/results/structure.md

``--before``: a checkout to compare with. Nothing is timed. Lines are those of files that git tracks. The core is the
top level, step, main_params, grad_sync, state, kernels with C, rules, utils and landed. An arrow is an import from one
package (or module of the top level) into another; those of type checkers alone do not count.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import host_time

CORE = {"(top level)", "step", "main_params", "grad_sync", "state", "kernels", "rules", "utils", "landed"}
NATIVE = {".c", ".h", ".cpp"}
Rows = dict[str, str]


def tracked(root: Path, folder: str) -> list[Path]:
    """Return the source files of a folder that git tracks."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", folder], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [root / name for name in listed if Path(name).suffix in {".py", *NATIVE}]


def num_lines(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text().splitlines())


def package_of(path: Path, root: Path) -> str:
    """Return the package of megascale that a file is in."""
    parts = path.relative_to(root / "megascale").parts
    return parts[0] if len(parts) > 1 else "(top level)"


def num_comment_lines(path: Path) -> int:
    """Return how many lines hold nothing but a comment, or end in one."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def arrows(root: Path) -> set[tuple[str, str]]:
    """Return the imports between packages; a module of the top level counts as one."""
    found = set()
    for path in tracked(root, "megascale"):
        if path.suffix != ".py":
            continue
        parts = path.relative_to(root / "megascale").with_suffix("").parts
        for node in runtime_nodes(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module == "megascale":
                names = [f"megascale.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                target = name.split(".")
                if target[0] == "megascale" and len(target) > 1 and target[1] != parts[0]:
                    found.add((parts[0], target[1]))
    return found


def runtime_nodes(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes below ``tree`` that are not for type checkers alone."""
    found: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            found += [node, *runtime_nodes(node)]
    return found


def num_two_way(pairs: set[tuple[str, str]]) -> int:
    """Return how many pairs of packages import each other: each holds an arrow that goes up."""
    return sum((target, source) in pairs for source, target in pairs) // 2


def num_exported(root: Path, package: str) -> int:
    """Return how many names a package's ``__init__.py`` lists in ``__all__``, or binds without an underscore."""
    path = root / "megascale" / ("" if package == "(top level)" else package) / "__init__.py"
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return len(ast.literal_eval(node.value))
    return 0


def measured(root: Path) -> Rows:
    """Return all rows of one checkout."""
    files = tracked(root, "megascale")
    lines = Counter[str]()
    for path in files:
        lines[package_of(path, root)] += num_lines(path)
    python = [path for path in files if path.suffix == ".py"]
    frames, functions, stepped = host_time.turn(root, "count_frames()", 1)
    pairs = arrows(root)
    comments = sum(map(num_comment_lines, python))
    rows = {
        "lines, all": f"{sum(lines.values()):,}",
        "lines, core": f"{sum(count for name, count in lines.items() if name in CORE):,}",
        "lines of C": f"{sum(num_lines(path) for path in files if path.suffix in NATIVE):,}",
        "lines of tests": f"{sum(map(num_lines, tracked(root, 'tests'))):,}",
        "files": str(len(files)),
        "comment lines, of Python": f"{comments:,} ({comments / sum(map(num_lines, python)):.1%})",
        "the simplest step: frames": str(frames),
        "the simplest step: functions": str(functions),
        "the simplest step: files": str(stepped),
        "arrows between packages": str(len(pairs)),
        "packages that import each other": str(num_two_way(pairs)),
    }
    for name in sorted(lines):
        exported = num_exported(root, name)
        rows[f"{name}: lines"] = f"{lines[name]:,}"
        if exported:
            rows[f"{name}: names in `__all__`"] = str(exported)
    return rows


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    here = measured(host_time.ROOT)
    before = {} if args.before is None else measured(args.before.resolve())
    lines = ["| | before | here |", "|---|---|---|"]
    lines += [f"| {name} | {before.get(name, '')} | {here.get(name, '')} |" for name in {**here, **before}]
    print("\n".join(lines))
    if args.out is not None:
        command = "python benchmarks/structure.py --before ../earlier --out benchmarks/results/structure.md"
        args.out.write_text(f"# What a reader must take in\n\n`{command}`\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
