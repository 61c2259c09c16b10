"""The pages have every public name, invariant and message, and what they name is there."""

import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from megascale import ChainedOptimizer, DistributedOptimizer

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _reference() -> str:
    return "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))


def test_every_page_has_its_place() -> None:
    """mkdocs.yml names every page once, and none but these; README.md leads to the first."""
    named = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert "docs/index.md" in (ROOT / "README.md").read_text()


def test_each_invariant_says_which_module_keeps_it() -> None:
    """Each invariant leads to a module; each module and folder of its page and of the architecture's is there."""
    invariants, architecture = ((DOCS / f"{name}.md").read_text() for name in ("invariants", "architecture"))
    sections = re.split(r"^## \d+\. ", invariants, flags=re.MULTILINE)[1:]
    assert [text for text in sections if not re.search(r"Kept by [^.]*`[\w/]+\.py`", text)] == []
    paths = re.findall(r"`([\w.]+(?:/[\w.]*)+|\w+\.py)`", invariants + architecture)
    assert len(paths) > 20
    assert [path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "megascale"))] == []


def _stable() -> dict[str, list[str]]:
    """Return the names that the page *What stays stable* lists, by module, and those of an optimizer."""
    section = (DOCS / "platforms.md").read_text().split("## What stays stable\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+) \|$", section, flags=re.MULTILINE)
    return {place: re.findall(r"`(\w+)`", names) for place, names in rows}


@pytest.mark.parametrize("place", _stable())
def test_what_stays_stable_is_there(place: str) -> None:
    """Each name of the list is there and in the API reference; neither a package nor an optimizer has others."""
    names = _stable()[place]
    if place == "optimizer":
        model = nn.Linear(1, 1)
        sharded = DistributedOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1), modules=model)
        offered: object = SimpleNamespace(
            **{name: ... for one in (sharded, ChainedOptimizer([sharded])) for name in dir(one) if name[0] != "_"}
        )
        assert {*vars(offered)} - {*dir(torch.optim.Optimizer), "defaults"} <= {*names}
    else:
        offered = importlib.import_module(place)
        assert set(getattr(offered, "__all__", names)) == set(names)
        assert set(names) <= set(re.findall(r"\w+", _reference()))
    assert [name for name in names if not hasattr(offered, name)] == []


def test_reference_has_every_error() -> None:
    """Each class of megascale.errors is in the API reference."""
    body = ast.parse((ROOT / "megascale/errors.py").read_text()).body
    assert {node.name for node in body if isinstance(node, ast.ClassDef)} <= set(re.findall(r"\w+", _reference()))


def _docstrings() -> dict[str, list[str]]:
    """Return the docstrings of all tests, by name."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(ast.get_docstring(node) or "")
    return found


def _numbers(docstring: str) -> set[int]:
    """Return the invariants that a docstring begins with: "Invariants 2 and 3: ..."."""
    cited = re.match(r"Invariants? ([\d, and]+)", docstring)
    return set() if cited is None else {int(number) for number in re.findall(r"\d+", cited[1])}


def test_every_invariant_is_proved() -> None:
    """Each invariant of the page names tests, whose docstrings name it; no docstring names one that is not there."""
    docstrings = _docstrings()
    sections = re.split(r"^## (\d+)\. ", (DOCS / "invariants.md").read_text(), flags=re.MULTILINE)[1:]
    invariants = {int(number): text for number, text in zip(sections[::2], sections[1::2], strict=True)}
    assert sorted(invariants) == list(range(1, 15))
    for number, text in invariants.items():
        tests = re.findall(r"`(test_\w+)`", text)
        assert tests, number
        for test in tests:
            assert any(number in _numbers(docstring) for docstring in docstrings.get(test, [])), (number, test)
    cited = {number for all_of_name in docstrings.values() for one in all_of_name for number in _numbers(one)}
    assert cited == set(invariants)


def _load_messages() -> ModuleType:
    """Return the module that reads messages from the source, as the site's hooks load it."""
    spec = importlib.util.spec_from_file_location("messages", DOCS / "assets/messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["messages"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_troubleshooting_explains_what_the_library_says() -> None:
    """Each message that the page explains is one of the library's; the page of all messages has every kind of error."""
    explained = re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(explained) > 15
    messages = _load_messages()
    trees = (ast.parse(path.read_text()) for path in (ROOT / "megascale").rglob("*.py"))
    strings = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    said = [message.text for message in messages.messages(ROOT / "megascale")] + [
        value for value in strings if isinstance(value, str)
    ]
    gone = [text for text in explained if not any(text in one for one in said)]
    assert gone == [], "docs/troubleshooting.md explains what the library does not say"
    assert "## UsageError" in messages.page(ROOT / "megascale")


@pytest.mark.slow
def test_the_search_works_where_pages_open_from_a_folder(tmp_path: Path) -> None:
    """A browser lets a page of file:// neither start a worker nor fetch an index: the search was dead."""
    yaml, browser = pytest.importorskip("yaml"), shutil.which("chromium") or shutil.which("google-chrome")
    pytest.importorskip("material")
    if browser is None:
        pytest.skip("needs chromium")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text()) | {"hooks": []}
    del config["nav"]
    config["plugins"].remove(next(plugin for plugin in config["plugins"] if "mkdocstrings" in plugin))
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    shutil.copytree(DOCS / "assets", tmp_path / "docs" / "assets")
    (tmp_path / "docs" / "index.md").write_text("# A page\n\nOf remainders.\n")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet"], cwd=tmp_path, check=True)
    asked = f"file://{tmp_path}/site/index.html?q=remainders"
    shown = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom", asked]
    assert ">1 matching document<" in subprocess.run(shown, capture_output=True, text=True, check=True).stdout
