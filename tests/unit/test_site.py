"""The site has every page, public name, invariant and message, and asks no other host for anything."""

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LISTED = (
    "megascale",
    "megascale.amp",
    "megascale.checkpoint",
    "megascale.debug",
    "megascale.interop",
    "megascale.metrics",
)
"""Modules whose ``__all__`` is their public surface, and can be imported everywhere."""


def _nav() -> list[str]:
    """Return the pages that mkdocs.yml names."""
    return re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)


def _reference() -> str:
    return "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))


def test_every_page_has_its_place() -> None:
    """mkdocs.yml names every page once, and none but these; README.md leads to the first. Two are made of code."""
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(_nav()) == sorted([*pages, "messages.md", "torch_names.md"])
    assert "docs/index.md" in (ROOT / "README.md").read_text()


def test_every_module_says_its_concept() -> None:
    """A reader finds what each module is for in its first line, a sentence of its own: `head -qn1` lists a package."""
    modules = sorted((ROOT / "megascale").rglob("*.py"))
    assert len(modules) > 200
    lines = {path: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0] for path in modules}
    assert [str(path) for path, line in lines.items() if not line.endswith(".") or len(line) < 30] == []
    assert len(set(lines.values())) == len(lines)


def _section(heading: str) -> str:
    """Return a section of the architecture page."""
    return (DOCS / "architecture.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def _rows(section: str) -> list[list[str]]:
    """Return the cells of a table's rows, without its header."""
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return lines[1:]


def test_architecture_has_the_layers_that_imports_go_down() -> None:
    """The page's table of layers is the contract that lint-imports checks, in its order; each says what it knows."""
    [contract, *_] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    rows = _rows(_section("The layers"))
    assert [re.findall(r"`(\w+)`", names) for names, _ in rows] == [
        [name for name in layer if name != "__main__"] for layer in layers
    ]
    assert all(knows for _, knows in rows)


def test_architecture_says_where_each_invariant_is_kept() -> None:
    """Each invariant has a row, under its name, that leads to a module; each module and folder of the page is there."""
    page = (DOCS / "architecture.md").read_text()
    named = dict(re.findall(r"^## (\d+)\. (.+)$", (DOCS / "invariants.md").read_text(), flags=re.MULTILINE))
    rows = _rows(_section("Where a promise is kept"))
    assert [invariant for invariant, _ in rows] == [f"{number}. {name}" for number, name in named.items()]
    assert [where for _, where in rows if not re.search(r"`[\w/]+\.py`", where)] == []
    paths = re.findall(r"`([\w.]+(?:/[\w.]*)+|\w+\.py)`", page)
    assert len(paths) > 20
    assert [path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "megascale"))] == []


def test_architecture_leads_to_every_note() -> None:
    """Each note of the page stands at the top of its module, under the words that the page has; there are no others."""
    rows = [re.findall(r"^\*(.+)\*$|^`(.+)`$", cell)[0] for row in _rows(_section("Notes")) for cell in row[:2]]
    assert len(rows) == 10
    for (title, _), (_, module) in zip(rows[::2], rows[1::2], strict=True):
        docstring = ast.get_docstring(ast.parse((ROOT / "megascale" / module).read_text())) or ""
        assert re.search(rf"(^|\*\*){title}\b", docstring), module
        assert docstring.count("\n**") >= 2, module


@pytest.mark.parametrize("module", LISTED)
def test_reference_has_every_public_name(module: str) -> None:
    """Each name in a package's ``__all__`` is a member that the API reference asks for."""
    asked = set(re.findall(r"\w+", _reference()))
    assert set(importlib.import_module(module).__all__) - asked == set()


def test_reference_has_every_error() -> None:
    """Each class of megascale.errors is in the API reference."""
    assert _errors() - set(re.findall(r"\w+", _reference())) == set()


def _errors() -> set[str]:
    """Return the names of all classes of megascale.errors."""
    tree = ast.parse((ROOT / "megascale/errors.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


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


EXPLAINED = {
    *("UsageError", "GradientError", "MainParamOverflowError", "NonFiniteParamError", "SkippedStepsError", "RunError"),
    *("MinScaleError",),
    *("ScalerOrderError", "ScalerArgumentError", "EmptyScalerStateError", "warning"),
}
"""Kinds of messages of which docs/troubleshooting.md explains each; of the others, those that need it."""


def _load_messages() -> ModuleType:
    """Return the module that reads messages from the source, as the site's hooks load it."""
    spec = importlib.util.spec_from_file_location("messages", DOCS / "assets/messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["messages"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _strings() -> list[str]:
    """Return all strings that the library's source writes out."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "megascale").rglob("*.py"))
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_troubleshooting_explains_what_the_library_says() -> None:
    """Each message that the page explains is one of the library's; each of the library's that users must understand is
    on the page; and so is each class of errors, by its name or as one of the classes explained message by message.
    """
    page = (DOCS / "troubleshooting.md").read_text()
    explained = re.findall(r"^\| `(.+?)` \|", page, flags=re.MULTILINE)
    found = list(_load_messages().messages(ROOT / "megascale"))
    said = [message.text for message in found] + _strings()
    gone = [text for text in explained if not any(text in one for one in said)]
    assert gone == [], "docs/troubleshooting.md explains what the library does not say"
    asked = [message for message in found if message.kind in EXPLAINED]
    assert len(asked) > 80
    missing = [message for message in asked if not any(text in message.text for text in explained)]
    assert missing == [], "give each a row in docs/troubleshooting.md: message, cause, remedy"
    assert _errors() - EXPLAINED - set(re.findall(r"\w+Error", page)) == {"MegascaleError"}


@pytest.mark.slow
def test_search_leads_from_a_message_to_its_remedy(site: Path) -> None:
    """Each message of docs/troubleshooting.md is a section of the search index, before other pages; tables of results
    are not in it.
    """
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    sections = {entry["location"]: entry for entry in index}
    assert not [place for place in sections if place.startswith("results/")]
    own = [entry for place, entry in sections.items() if place.startswith("troubleshooting.html#")]
    rows = re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(own) > len(rows) > 200
    assert {entry.get("boost") for entry in own} == {2}
    found = [entry for entry in own if "nobody has asked for the loss scale" in entry["title"]]
    assert len(found) == 1
    assert "What to do:" in found[0]["text"]


class _Resources(HTMLParser):
    """Collects what a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of a script, a style sheet, an icon, a picture or a frame."""
        given: dict[str, Any] = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio"):
            self.urls.append(given.get("src") or "")
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "alternate", "author"):
            self.urls.append(given.get("href") or "")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder of the built site: that which .ci/run has built, or one of its own."""
    if built := os.environ.get("MEGASCALE_SITE"):
        return Path(built)
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=quiet)
    assert done.returncode == 0, done.stderr
    return tmp_path


@pytest.mark.slow
def test_site_asks_no_other_host(site: Path) -> None:
    """What the built site loads lies with it, and the reference shows all public names."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(_nav())
    reference = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    shown = set(re.findall(r"doc-object-name[^>]*>(\w+)<", reference))
    for module in LISTED:  # not the module of the same name
        assert set(importlib.import_module(module).__all__) - shown == set(), module
    for page in pages:
        resources = _Resources()
        resources.feed(page.read_text())
        assert [url for url in resources.urls if urlparse(url).netloc] == [], page.name
        # A docstring's role; two powers in a sentence, 2**16 and 2**32, that were taken for bold letters between them.
        assert re.findall(r":(?:class|meth|func|mod):|<strong>-?\d[^<]*", page.read_text()) == [], page.name
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import", style.read_text()) == [], style.name
