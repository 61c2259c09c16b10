"""What is handed to others is whole: the source distribution, the wheel, and the version that all files tell."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from megascale.kernels.native import levels
from megascale.utils.torch_names import NEWEST, OLDEST
from megascale.version import VERSION

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


def _tracked() -> list[str]:
    """Return the files that git knows and that are here. Skips the test outside of a clone."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if told.returncode != 0:
        pytest.skip("needs a clone: git tells which files there are")
    return [name for name in told.stdout.split("\0") if name and (ROOT / name).exists()]


def _build(kind: str, source: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """Return the ``kind`` ("sdist" or "wheel") that setuptools makes of ``source``, and the build's log."""
    pytest.importorskip("setuptools", minversion="77")
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(
        command,
        cwd=source,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=280,
    )
    [made] = out.iterdir()
    return made, done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the source distribution of all tracked files unpacks to."""
    clone, folder = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("sdist")
    for name in _tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    with tarfile.open(_build("sdist", clone, folder)[0]) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"megascale-{VERSION}"


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made of the source distribution alone."""
    return _build("wheel", source, tmp_path_factory.mktemp("wheel"))[0]


@pytest.mark.release
def test_source_distribution_and_wheel_are_whole(source: Path, wheel: Path) -> None:
    """The source distribution has every tracked file; the wheel made of it alone has every file of the package, and
    a library of native.c for each level of this kind of machine. It is for that machine, and for any Python.
    """
    tracked = _tracked()
    assert [name for name in tracked if not (source / name).exists() and name != ".gitignore"] == []
    with zipfile.ZipFile(wheel) as opened:
        packed = opened.namelist()
        libraries = {name: opened.read(name) for name in packed if "/prebuilt/" in name}
    assert sorted(name for name in packed if ".dist-info/" not in name and name not in libraries) == sorted(
        name for name in tracked if name.startswith("megascale/")
    )
    folder = PurePosixPath("megascale/kernels/native/prebuilt")
    expected = {
        str(folder / levels.file_name(PurePosixPath(name).name.split("-")[0], content)): content
        for name, content in libraries.items()
    }
    assert libraries == expected
    assert sorted(PurePosixPath(name).name.split("-")[0] for name in libraries) == sorted(levels.levels_here())
    tags = wheel.stem.split("-")[2:]
    assert tags[:2] == ["py3", "none"]
    assert (tags[2] != "any") == bool(libraries)
    assert any(name.endswith("licenses/LICENSE") for name in packed)


@pytest.mark.release
@pytest.mark.parametrize("compiler", ["false", "surely-no-compiler", "gcc 'half"])
def test_wheel_that_cannot_be_compiled_is_pure(compiler: str, source: Path, tmp_path: Path) -> None:
    """A compiler that fails, is not there or is no command: a wheel for any machine, and the build's log says so."""
    made, told = _build("wheel", source, tmp_path, CC=compiler)
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as opened:
        assert [name for name in opened.namelist() if "prebuilt" in name and not name.endswith(".py")] == []
    assert "this wheel has no library 'baseline'" in told or not levels.levels_here()
    assert "this wheel is pure" in told


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and beside it what this one has, such as torch."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True, timeout=120)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


def _trained(python: Path, folder: Path, **environment: str) -> dict[str, Any]:
    """Return what tests/wheel_training.py prints; without a compiler unless ``environment`` has a PATH."""
    outside = {
        key: value for key, value in os.environ.items() if not key.startswith(("MEGASCALE_", "PYTHON", "CC", "CXX"))
    }
    outside |= {"PATH": "/nowhere", "MEGASCALE_CACHE_DIR": str(folder / "cache")} | environment
    command = [str(python), "-W", "error::UserWarning", str(ROOT / "tests" / "wheel_training.py")]
    done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert Path(found["file"]).is_relative_to(python.parents[1])
    return found


@pytest.mark.release
@pytest.mark.skipif(not levels.supported(), reason="no library is made for this kind of machine")
def test_wheel_trains_the_same_bits_without_a_compiler(bare: Path, tmp_path: Path) -> None:
    """With no compiler on the machine the default is `native`, by the highest level's library; at each level, and as
    compiled here, all rules, dtypes and moments give the same bits; without clipping they are the reference's.
    """
    compiled = _trained(bare, tmp_path, PATH=os.environ["PATH"])
    assert compiled["backend"] == "native"
    assert compiled["said"] == []
    found = {"": _trained(bare, tmp_path)}
    found |= {name: _trained(bare, tmp_path, MEGASCALE_NATIVE_LIBRARY=name) for name in levels.supported()}
    for name, ours in found.items():
        assert ours["backend"] == "native"
        assert f"native.c's library {name or levels.supported()[0]}, of the wheel" in ours["said"]
        assert ours["digests"] == compiled["digests"]
    reference = _trained(bare, tmp_path, MEGASCALE_BACKEND="reference")
    assert reference["backend"] == "reference"
    unclipped = {case: found for case, found in compiled["digests"].items() if case.endswith("unclipped")}
    assert len(unclipped) == 48
    assert unclipped == {case: reference["digests"][case] for case in unclipped}


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
    """Commands and files that .github/workflows names exist in the repository."""
    workflows = "".join(path.read_text() for path in WORKFLOWS)
    named = set(re.findall(r"(?:\.\./)?((?:examples|\.ci)/\w+[\w.]*)", workflows))
    assert named >= {".ci/run", ".ci/release"}
    assert {name for name in named if not (ROOT / name).exists()} == set()
    assert "-c constraints.txt" in workflows


@pytest.mark.slow
@pytest.mark.parametrize("version", [f"{OLDEST}.0", f"{NEWEST}.0"])
def test_constraints_keep_the_torch_that_is_installed(tmp_path: Path, version: str) -> None:
    """README.md says so. It was replaced: constraints.txt pinned one version.

    Of the environment's torch there are metadata alone, and no index: pip fails where it wants another one.
    """
    pytest.importorskip("pip")
    venv.create(tmp_path / "env")
    [packages] = tmp_path.glob("env/lib/python*/site-packages")
    for name, installed in (("torch", version), ("numpy", "2.3.0")):
        metadata = packages / f"{name}-{installed}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {installed}\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "env/bin/python"), "install", "--no-index"]
    asked = ["--dry-run", "-c", str(ROOT / "constraints.txt"), *project["dependencies"]]
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run([*pip, *asked], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout


def test_checks_have_one_torch() -> None:
    """.ci/torch.txt pins a supported version; .ci/run and the workflow's jobs that install torch take it from there."""
    [pin] = re.findall(r"^torch==(.+)$", (ROOT / ".ci/torch.txt").read_text(), flags=re.MULTILINE)
    assert TorchVersion(OLDEST) <= TorchVersion(pin) <= TorchVersion(f"{NEWEST}.99")
    assert "-c .ci/torch.txt torch\n" in (ROOT / ".ci/run").read_text()
    lines = [line for path in WORKFLOWS for line in path.read_text().splitlines()]
    installs = [line for line in lines if "/bin/pip install" in line]
    assert len(installs) == 3
    assert all("-c .ci/torch.txt" in line for line in installs)
