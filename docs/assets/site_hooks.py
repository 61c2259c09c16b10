"""What the site shows of files outside docs/: the tables of benchmarks/results, each as a page of its own."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = "benchmarks/results"


def on_files(files: Files, config: Any) -> Files:
    """Add the tables to the site's files."""
    for path in sorted((Path(config.config_file_path).parent / RESULTS).glob("*.md")):
        page = File.generated(config, f"results/{path.name}", abs_src_path=str(path))
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to the tables there, and links to the files at the top of the repository to their pages."""
    return re.sub(rf"\]\(\.\./{RESULTS}/", "](results/", markdown)
