"""Changes the core at random, one small change at a time, and asks whether the default tests notice.

    python -m tests.mutants --sample 100 --seed 1 --jobs 2 --out benchmarks/results/mutants.md

Each mutant is one operator, comparison, constant, condition or statement of one module, changed in a copy of the
repository. One run of the default tests, with a mark before the statement of every mutant, shows which tests execute
it. Each mutant then meets those tests, the quickest files first, until one fails. What survives is printed: either a
test is missing, or the change makes no difference. What is caught is printed with the test that failed, so that a
failure by chance can be told. A mutant that takes more memory than ``--memory`` fails, before the machine does.
"""

import argparse
import ast
import json
import os
import queue
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = ROOT / "megascale/kernels/native/libraries"
"""Built at installation: without them no test runs where they could be built."""
# What the project exists for: the step and what it stands on. Programs, adapters, file formats and pages are not in it,
# nor is what runs on a GPU only.
OUTSIDE = (
    "amp", "checkpoint", "cli", "integrations", "interop", "train", "apex_backend", "triton", "step_graph", "__main__",
    "__init__", "program", "metrics", "estimation",
)  # fmt: skip
SECONDS = 900
"""After which a run of tests counts as failed: something waits for ever. A busy machine needs more (``--limit``)."""

MARKS = "MEGASCALE_MARKS"
"""The environment variable that names the folder of marks."""

MEMORY = 8.0
"""GB: a mutant whose loop does not end may take all that there is."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One change: lines and columns as :mod:`ast` has them, in UTF-8 bytes."""

    file: str
    line: int
    end_line: int
    begin: int
    end: int
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """Return the module with this change."""
        lines = source.splitlines(keepends=True)
        first, last = lines[self.line - 1], lines[self.end_line - 1]
        changed = first[: self.begin] + self.after.encode() + last[self.end :]
        return b"".join([*lines[: self.line - 1], changed, *lines[self.end_line :]])

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line}: `{before}` -> `{after}`"


def core() -> list[Path]:
    """Return the modules that are changed."""
    modules = sorted((ROOT / "megascale").rglob("*.py"))
    return [
        path for path in modules if not set(path.relative_to(ROOT / "megascale").with_suffix("").parts) & set(OUTSIDE)
    ]


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module. Messages, docstrings, annotations and contracts of types stay as they are."""
    source = path.read_bytes()
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    left_out = {id(inner) for node in ast.walk(tree) for part in _unchanged(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in left_out or not isinstance(node, (ast.expr, ast.stmt)):
            continue
        before = _text(lines, node)
        for after in _changes(node):
            if after == before:
                continue
            yield Mutant(
                str(path.relative_to(ROOT)),
                node.lineno,
                node.end_lineno or node.lineno,
                node.col_offset,
                node.end_col_offset or node.col_offset,
                before,
                after,
            )


def _text(lines: list[bytes], node: ast.expr | ast.stmt) -> str:
    """Return a node's source. :func:`ast.get_source_segment` would cut the module into lines each time."""
    end = node.end_lineno or node.lineno
    text = b"".join([*lines[node.lineno - 1 : end - 1], lines[end - 1][: node.end_col_offset]])
    return text[node.col_offset :].decode()


def _unchanged(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise):
        yield node
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from node.decorator_list
        yield from filter(None, [node.returns, *(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg))])
    elif isinstance(node, ast.ClassDef):
        yield from node.decorator_list
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation
    elif isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)) or _is_for_types(node):
        yield node


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.unparse(ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield repr(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, (ast.Assign, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return None"


def marked(source: str, places: dict[int, tuple[int, int]]) -> str:
    """Return a module that makes a file, named by the mutant, before it executes the statement of each.

    ``places``: of each mutant, its line and column.
    """
    tree = ast.parse(source)
    inner: dict[int, tuple[list[ast.stmt], ast.stmt]] = {}
    for body in _bodies(tree):
        for statement in body:
            begin = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
            for number, (line, column) in places.items():
                end = statement.end_lineno or statement.lineno, statement.end_col_offset or 0
                if (begin, 0 if begin < statement.lineno else statement.col_offset) <= (line, column) < end:
                    inner[number] = body, statement  # bodies come before those inside them
    for number, (body, statement) in inner.items():
        text = f"(lambda to: to and open(f'{{to}}/{number}', 'ab').close())(__import__('os').environ.get('{MARKS}'))"
        body.insert(body.index(statement), ast.parse(text).body[0])
    head = [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
    tree.body = [*head, *(one for one in tree.body if one not in head)]
    return ast.unparse(ast.fix_missing_locations(tree))


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield each list of statements, outer ones first."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                yield body


@dataclass(eq=False)  # pytest puts plugins into sets
class Executed:
    """Which tests execute each mutant's statement; as a pytest plugin it finds out."""

    marks: Path
    tests: dict[int, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    always: set[int] = field(default_factory=set)
    """Executed on import: any test may notice."""
    failed: set[str] = field(default_factory=set)
    """Tests that fail without a mutant, as those of what may be written do beside marks: no mutant meets them."""

    def taken(self) -> list[int]:
        """Return the mutants whose marks were met since the last call."""
        met = [int(path.name) for path in self.marks.iterdir()]
        for number in met:
            (self.marks / str(number)).unlink()
        return met

    def pytest_collection_finish(self) -> None:
        """What was executed until here belongs to no test."""
        self.always |= set(self.taken())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what each test has executed, with what was set up for it."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)
        for number in self.taken():
            self.tests.setdefault(number, []).append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write everything for the process that waits."""
        found = {"tests": self.tests, "seconds": self.seconds, "always": [*self.always], "failed": [*self.failed]}
        (self.marks.parent / "executed.json").write_text(json.dumps(found))

    @staticmethod
    def read(folder: Path) -> "Executed":
        """Return what a run has written of the tests that passed, each once."""
        found = json.loads((folder / "executed.json").read_text())
        seconds = {name: taken for name, taken in found["seconds"].items() if name not in found["failed"]}
        tests = {
            int(number): [name for name in dict.fromkeys(names) if name in seconds]
            for number, names in found["tests"].items()
        }
        return Executed(folder, tests, seconds, set(found["always"]))

    def of(self, number: int) -> list[str]:
        """Return the tests to run, those of the quickest file first."""
        chosen = list(self.seconds) if number in self.always else self.tests.get(number, [])
        files: dict[str, float] = {}
        for name in chosen:
            file = name.partition("::")[0]
            files[file] = files.get(file, 0.0) + self.seconds[name]
        return sorted(chosen, key=lambda name: (files[name.partition("::")[0]], name.partition("::")[0]))


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the run with marks, as its plugin."""
    if MARKS in os.environ:
        config.pluginmanager.register(Executed(Path(os.environ[MARKS])), "executed")


class Copy:
    """A copy of the repository in which mutants live, one after the other."""

    def __init__(self, folder: Path, limit: float = SECONDS) -> None:
        self.folder, self.marks, self.limit = folder / "repository", folder / "marks", limit
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, files.split("\0")):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.folder / name, follow_symlinks=False)
        shutil.copytree(LIBRARIES, self.folder / LIBRARIES.relative_to(ROOT))

    def executed(self, sample: list[Mutant]) -> Executed:
        """Run all default tests and return which of them execute which mutants."""
        with self.marking(sample) as environment:
            done = self._pytest(["-p", "tests.mutants"], environment, None)
        if done.returncode > 1:  # 1: tests failed, which are left out
            sys.exit(f"the tests do not run:\n{done.stdout[-3000:]}")
        print(*re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE), sep="\n")
        return Executed.read(self.marks.parent)

    @contextmanager
    def marking(self, sample: list[Mutant]) -> Iterator[dict[str, str]]:
        """Let the copy's modules make a file in :attr:`marks` for each mutant whose statement a program executes.

        Yields the environment that the program needs.
        """
        self.marks.mkdir()
        originals = {name: (self.folder / name).read_bytes() for name in {mutant.file for mutant in sample}}
        for name, original in originals.items():
            places = {at: (one.line, one.begin) for at, one in enumerate(sample) if one.file == name}
            (self.folder / name).write_text(marked(original.decode(), places))
        yield {MARKS: str(self.marks)}
        for name, original in originals.items():
            (self.folder / name).write_bytes(original)

    @contextmanager
    def applied(self, mutant: Mutant) -> Iterator[None]:
        """Change the copy meanwhile."""
        target = self.folder / mutant.file
        original = target.read_bytes()
        target.write_bytes(mutant.applied(original))
        try:
            yield
        finally:
            target.write_bytes(original)

    def outcome(self, mutant: Mutant, tests: list[str]) -> str:
        """Return ``"caught"`` and the test that did it, ``"SURVIVED"`` where none did, or ``"waited"`` at the limit."""
        if not tests:
            return "SURVIVED, as no test executes it"
        names = self.folder.parent / "names"
        names.write_text("\n".join(tests))
        try:
            with self.applied(mutant):
                done = self._pytest(["-x", "--timeout", str(self.limit / 9), f"@{names}"], {}, self.limit)
        except subprocess.TimeoutExpired:
            return "waited"
        if done.returncode == 0:
            return "SURVIVED"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return f"caught by {failed[1] if failed else f'an exit with {done.returncode}'}"

    def _pytest(
        self, options: list[str], environment: dict[str, str], limit: float | None
    ) -> subprocess.CompletedProcess[str]:
        """Run tests in one process: a mark is of the test that runs when it is met."""
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )


def tried(sample: list[Mutant], copies: list[Copy]) -> dict[Mutant, str]:
    """Return the outcome of each mutant, and print it. Each copy has a thread."""
    executed = copies[0].executed(sample)
    print(f"{len(executed.seconds)} tests in {sum(executed.seconds.values()):.0f} s", flush=True)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(sample)):
        todo.put(number)
    outcomes: dict[Mutant, str] = {}

    def work(copy: Copy) -> None:
        while True:
            try:
                number = todo.get_nowait()
            except queue.Empty:
                return
            start, mutant, tests = time.monotonic(), sample[number], executed.of(number)
            outcomes[mutant] = copy.outcome(mutant, tests)
            print(f"{outcomes[mutant]}, {len(tests)} tests, {time.monotonic() - start:.0f} s: {mutant}", flush=True)

    workers = [threading.Thread(target=work, args=[copy]) for copy in copies]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcomes


def main() -> None:
    """Try a sample, print each outcome, and write the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, help="mutants to try (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which mutants (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time (default: %(default)s)")
    parser.add_argument("--only", default="", help="only modules whose path contains this")
    parser.add_argument(
        "--limit", type=float, default=SECONDS, help="seconds for the tests of a mutant (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="write a table of survivors there")
    parser.add_argument(
        "--memory", type=float, default=MEMORY, help="GB that a process of a mutant may take (default: %(default)s)"
    )
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(given.memory * 1e9), most))  # inherited by all tests
    everything = [mutant for path in core() if given.only in str(path) for mutant in mutants_of(path)]
    sample = random.Random(given.seed).sample(everything, min(given.sample, len(everything)))
    with tempfile.TemporaryDirectory() as folder:
        copies = [Copy(Path(folder) / str(job), given.limit) for job in range(given.jobs)]
        outcomes = tried(sample, copies)
    survivors = [mutant for mutant in sample if outcomes[mutant].startswith("SURVIVED")]
    waited = [mutant for mutant in sample if outcomes[mutant] == "waited"]
    caught = f"{len(sample) - len(survivors)} of {len(sample)} mutants caught, of {len(everything)} that there are"
    if waited:
        caught += f"; {len(waited)} of them by the limit of {given.limit:g} s"
    print(caught)
    if given.out is not None:
        lines = [
            "# Mutants of the core",
            "",
            f"`python -m tests.mutants {' '.join(sys.argv[1:])}`",
            "",
            f"{caught}.",
            "",
        ]
        listed = [f"- {outcomes[mutant]}: {mutant}" for mutant in [*survivors, *waited]]
        given.out.write_text("\n".join([*lines, *listed]) + "\n")


if __name__ == "__main__":
    main()
