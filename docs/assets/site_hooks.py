"""What the site shows beside the files of docs/: the tables of benchmarks/results, and the messages of all errors.
A row of docs/troubleshooting.md becomes a heading, which the site's search leads to.
"""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = "benchmarks/results"
HEADS = ("message", "what you see")
"""First column of a table of docs/troubleshooting.md whose rows become headings."""


def on_files(files: Files, config: Any) -> Files:
    """Add those pages to the site's files."""
    root = Path(config.config_file_path).parent
    pages = [File.generated(config, "messages.md", content=_load("messages").page(root / "megascale"))]
    for path in sorted((root / RESULTS).glob("*.md")):
        pages.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    for page in pages:
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_config(config: Any) -> Any:
    """Show the version, and a link to the repository if there is one: both are in pyproject.toml."""
    project = tomllib.loads((Path(config.config_file_path).parent / "pyproject.toml").read_text())["project"]
    config.site_name = f"{config.site_name} {project['version']}"
    if repository := project.get("urls", {}).get("Repository"):
        config.repo_url = repository
        config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the tables there; give messages headings of their own, and put them first in the search."""
    if page.file.src_uri.startswith("results/"):
        page.meta["search"] = {"exclude": True}
    if page.file.src_uri == "messages.md":
        page.meta["search"] = {"boost": 0.5}
    if page.file.src_uri == "troubleshooting.md":
        page.meta["search"] = {"boost": 2}
        markdown = headed(markdown)
    if page.file.src_uri == "platforms.md":
        page.meta["hide"] = ["toc"]  # a table of seven columns needs the width
    return re.sub(rf"\]\(\.\./{RESULTS}/", "](results/", markdown)


def headed(markdown: str) -> str:
    """Return a page with each row of its tables of messages, causes and remedies as a heading and two paragraphs."""
    lines: list[str] = []
    is_table = False
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        is_table = len(cells) == 3 and (is_table or cells[0] in HEADS)
        if not is_table:
            lines.append(line)
        elif cells[0] not in HEADS and not cells[0].startswith("---"):
            message, cause, remedy = (cell.replace("\\|", "|") for cell in cells)
            lines += [f"### {message}", "", cause, "", f"**What to do:** {remedy}", ""]
    return "\n".join(["<div class=ms-messages></div>", "", *lines])


def _load(name: str) -> ModuleType:
    """Return a module beside this one. mkdocs loads hooks by their files, so that they cannot import it."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"docs/assets/{name}.py cannot be loaded")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
