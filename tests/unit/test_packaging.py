"""What is handed to others is whole: the source distribution, the wheel, and the version that all files tell."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from megascale.version import VERSION

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


def _tracked() -> list[str]:
    """Return the files that git knows and that are here. Skips the test outside of a clone."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if told.returncode != 0:
        pytest.skip("needs a clone: git tells which files there are")
    return [name for name in told.stdout.split("\0") if name and (ROOT / name).exists()]


def _build(kind: str, source: Path, out: Path) -> Path:
    """Return the ``kind`` ("sdist" or "wheel") that setuptools makes of ``source``."""
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    subprocess.run(command, cwd=source, capture_output=True, check=True, timeout=120)
    [made] = out.iterdir()
    return made


@pytest.mark.slow
def test_source_distribution_and_wheel_are_whole(tmp_path: Path) -> None:
    """The source distribution has every tracked file; the wheel made of it alone has every file of the package."""
    tracked = _tracked()
    for name in tracked:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name, follow_symlinks=False)
    for folder in ("sdist", "wheel"):
        (tmp_path / folder).mkdir()
    with tarfile.open(_build("sdist", tmp_path / "clone", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"megascale-{VERSION}"
    assert [name for name in tracked if not (source / name).exists() and name != ".gitignore"] == []
    with zipfile.ZipFile(_build("wheel", source, tmp_path / "wheel")) as wheel:
        packed = wheel.namelist()
    assert sorted(name for name in packed if ".dist-info/" not in name) == sorted(
        name for name in tracked if name.startswith("megascale/")
    )
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_version_is_one() -> None:
    """pyproject.toml, CITATION.cff, CHANGELOG.md and the package tell the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert citation is not None
    assert project["version"] == citation[1] == VERSION
    assert VERSION in (ROOT / "CHANGELOG.md").read_text()


def test_licence_is_named_where_tools_look() -> None:
    """pyproject.toml, CITATION.cff and LICENSE name one licence and the same holders."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "BSD-3-Clause"
    assert "license: BSD-3-Clause" in (ROOT / "CITATION.cff").read_text()
    licence = (ROOT / "LICENSE").read_text()
    assert licence.startswith("BSD 3-Clause License")
    [holders] = [author["name"] for author in project["authors"]]
    assert holders in licence
    assert holders in (ROOT / "CITATION.cff").read_text()


def test_workflow_runs_what_is_there() -> None:
    """Commands and files that .github/workflows name exist in the repository."""
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    named = set(re.findall(r"(?:\.\./)?((?:examples|\.ci)/\w+[\w.]*)", workflow))
    assert named >= {".ci/run"}
    assert {name for name in named if not (ROOT / name).exists()} == set()
    assert "-c constraints.txt" in workflow
