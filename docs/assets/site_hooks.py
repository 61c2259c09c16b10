"""What the site shows beside the files of docs/: the tables of benchmarks/results, the messages of all errors,
and private names of torch.
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = "benchmarks/results"


def on_files(files: Files, config: Any) -> Files:
    """Add those pages to the site's files."""
    root = Path(config.config_file_path).parent
    files.append(File.generated(config, "messages.md", content=_load("messages").page(root / "megascale")))
    files.append(File.generated(config, "torch_names.md", content=_load("torch_names").page(root / "megascale")))
    for path in sorted((root / RESULTS).glob("*.md")):
        page = File.generated(config, f"results/{path.name}", abs_src_path=str(path))
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to the tables there."""
    return re.sub(rf"\]\(\.\./{RESULTS}/", "](results/", markdown)


def _load(name: str) -> ModuleType:
    """Return a module beside this one. mkdocs loads hooks by their files, so that they cannot import it."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"docs/assets/{name}.py cannot be loaded")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
