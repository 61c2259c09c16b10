"""What is handed to others is whole: the source distribution, the wheel, and the version that all files tell."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from megascale.kernels.native import levels
from megascale.utils.supported_torch import NEWEST, OLDEST
from megascale.version import VERSION

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
LIBRARIES = levels.FOLDER.relative_to(ROOT)
FUNCTIONS = ("measure", "update", "update_compact", "hold", "total", "decide", "rescale")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


def _tracked() -> list[str]:
    """Return the files that git knows and that are here. Skips the test outside of a clone."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if told.returncode != 0:
        pytest.skip("needs a clone: git tells which files there are")
    return [name for name in told.stdout.split("\0") if name and (ROOT / name).exists()]


def _build(kind: str, source: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """Return the ``kind`` ("sdist", "wheel" or "editable") that setuptools makes of ``source``, and the build's log."""
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
    [made] = out.glob("megascale-*")
    return made, done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the source distribution of all tracked files unpacks to, with a native.c that compiles in no time."""
    clone, folder = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("sdist")
    for name in _tracked():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    (clone / levels.SOURCE.relative_to(ROOT)).write_text("".join(f"void {name}(void) {{}}\n" for name in FUNCTIONS))
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
    libraries = [name for name in packed if Path(name).parent == LIBRARIES]
    assert sorted(Path(name).name.partition("-")[0] for name in libraries) == sorted(levels.levels_here())
    assert sorted(name for name in packed if ".dist-info/" not in name and name not in libraries) == sorted(
        name for name in tracked if name.startswith("megascale/")
    )
    tags = wheel.stem.split("-")[2:]
    assert tags[:2] == ["py3", "none"]
    assert (tags[2] != "any") == bool(libraries)
    assert any(name.endswith("licenses/LICENSE") for name in packed)


@pytest.mark.release
def test_wheel_that_cannot_be_compiled_is_pure(source: Path, wheel: Path, tmp_path: Path) -> None:
    """A wheel for any machine, and the build's log says so, also where an earlier build has left libraries."""
    made, told = _build("wheel", source, tmp_path, CC="false")
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as opened:
        assert [name for name in opened.namelist() if name.endswith(".so")] == []
    assert "there is no library 'baseline' of native.c" in told or not levels.levels_here()
    assert "there is no native backend" in told


def _environment(folder: Path, *packages: Path) -> Path:
    """Return the Python of an environment that has what this one has, such as torch, and ``packages``."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("".join(f"{path}\n" for path in (*packages, Path(torch.__file__).parents[1])))
    return folder / "bin/python"


CHOSEN = """
import megascale
from megascale.kernels.native.library import library
print(megascale.__file__, megascale.kernels.select_backend().name, library()._name)
"""


def _chosen(python: Path, folder: Path) -> list[str]:
    """Return where megascale lies, which backend is the default, and which library that has; without a compiler."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("MEGASCALE_", "PYTHON"))}
    command = [str(python), "-W", "error::UserWarning", "-c", CHOSEN]
    done = subprocess.run(
        command, cwd=folder, env=outside | {"PATH": "/nowhere"}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.release
@pytest.mark.skipif(not levels.supported(), reason="no library is made for this kind of machine")
def test_wheel_brings_the_native_backend(wheel: Path, tmp_path: Path) -> None:
    """On a machine without a compiler; the library is that of the highest level that this CPU has."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    python = _environment(tmp_path / "environment", tmp_path / "site")
    file, backend, library = _chosen(python, tmp_path)
    assert Path(file).is_relative_to(tmp_path)
    assert backend == "native"
    assert library.startswith(str(tmp_path / "site" / LIBRARIES / levels.supported()[0]))


@pytest.mark.release
@pytest.mark.skipif(not levels.supported(), reason="no library is made for this kind of machine")
def test_editable_install_builds_what_it_runs(source: Path, tmp_path: Path) -> None:
    """Beside its sources; libraries of earlier sources go. A clone that is not installed has none."""
    clone = shutil.copytree(source, tmp_path / "clone", ignore=shutil.ignore_patterns("build"))
    python = _environment(tmp_path / "environment", clone)
    stale = clone / LIBRARIES / "baseline-of-earlier-sources.so"
    stale.parent.mkdir()
    stale.touch()
    with pytest.raises(AssertionError, match=r"older than its sources; .* -m pip install --no-deps -e "):
        _chosen(python, tmp_path)
    (tmp_path / "wheel").mkdir()
    _build("editable", clone, tmp_path / "wheel")
    assert sorted(path.name.partition("-")[0] for path in stale.parent.iterdir()) == sorted(levels.levels_here())
    _, backend, library = _chosen(python, tmp_path)
    assert backend == "native"
    assert library.startswith(str(stale.with_name(levels.supported()[0])))


def test_version_is_one() -> None:
    """pyproject.toml, CITATION.cff, CHANGELOG.md and the package tell the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert citation is not None
    assert project["version"] == citation[1] == VERSION
    assert VERSION in (ROOT / "CHANGELOG.md").read_text()


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
