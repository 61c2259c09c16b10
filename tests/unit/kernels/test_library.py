"""The libraries of native.c that an installation builds: which one is loaded, and that none of other sources is."""

import ctypes
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.errors import UsageError
from megascale.kernels import select_backend
from megascale.kernels.native import levels, library
from tests import needs

pytestmark = [
    pytest.mark.c_compiler,
    pytest.mark.skipif("avx2" not in levels.supported(), reason="needs an x86-64 CPU with AVX2"),
]
FUNCTIONS = ("measure", "update", "update_compact", "total", "decide", "rescale")
BELOW = ["avx2", "baseline"]


@pytest.fixture(autouse=True)
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A clone with a small native.c, on a CPU without AVX-512, and nothing built; its library is not yet loaded."""
    native, cpuinfo = tmp_path / "a clone/megascale/kernels/native", tmp_path / "cpuinfo"
    native.mkdir(parents=True)
    (tmp_path / "a clone/setup.py").touch()
    (native / "native.c").write_text("".join(f"int {name}(void) {{ return WIDTH; }}\n" for name in FUNCTIONS))
    cpuinfo.write_text(f"processor: 0\nflags\t\t: {' '.join(levels.LEVELS['x86_64']['avx2'].features)}\n")
    widths = zip(levels.LEVELS["x86_64"].items(), (4, 8, 16), strict=True)
    flags = {name: level._replace(flags=(*level.flags, f"-DWIDTH={width}")) for (name, level), width in widths}
    monkeypatch.setattr(levels, "LEVELS", {"x86_64": flags})
    monkeypatch.setattr(levels, "SOURCE", native / "native.c")
    monkeypatch.setattr(levels, "FOLDER", native / "libraries")
    monkeypatch.setattr(levels, "CPUINFO", cpuinfo)
    monkeypatch.delenv("MEGASCALE_BACKEND", raising=False)
    library.library.cache_clear()
    yield tmp_path / "a clone"
    library.library.cache_clear()


def _width() -> int:
    """Return what the library was compiled for, in floats."""
    library.library.cache_clear()
    loaded = library.library()
    loaded.total.restype, loaded.total.argtypes = ctypes.c_int, []
    return int(loaded.total())


def test_the_highest_level_of_this_cpu_is_loaded() -> None:
    """Of three libraries the CPU can run two; where one is missing, the next lower one serves."""
    assert levels.build(levels.FOLDER) == {}
    assert _width() == 8
    levels.path("avx2").unlink()
    assert _width() == 4
    levels.path("baseline").unlink()
    with pytest.raises(UsageError):
        _width()


def test_levels_are_told_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one feature is missing, or nothing is told, the level is not there; the baseline always is."""
    assert levels.supported() == BELOW
    wanted = levels.LEVELS["x86_64"]["avx512"].features
    levels.CPUINFO.write_text(f"flags : {' '.join(wanted)}\n")
    assert levels.supported() == ["avx512", *BELOW]
    for feature in ("avx512bw", "avx512vl"):
        levels.CPUINFO.write_text(f"flags : {' '.join(wanted - {feature})}\n")
        assert levels.supported() == BELOW
    levels.CPUINFO.write_text(f"flags : {' '.join(wanted - {'f16c'})}\n")
    assert levels.supported() == ["baseline"]
    levels.CPUINFO.unlink()
    assert levels.supported() == ["baseline"]
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert levels.supported() == []
    with pytest.raises(UsageError, match="no library for Darwin on x86_64"):
        library.library()


def test_a_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources, headers and flags are in the name. Building again removes it."""
    levels.build(levels.FOLDER)
    before = set(levels.FOLDER.iterdir())
    for attribute, value in {"HEADERS": " ", "FLAGS": ("-O1",), "LINK_FLAGS": ("-shared",)}.items():
        with monkeypatch.context() as patch:
            patch.setattr(levels, attribute, value)
            with pytest.raises(UsageError, match="is older than its sources"):
                library.library()
    assert levels.build(levels.FOLDER) == {}
    assert set(levels.FOLDER.iterdir()) == before
    levels.SOURCE.write_text(levels.SOURCE.read_text() + " ")
    with pytest.raises(UsageError, match="is older than its sources"):
        library.library()
    assert levels.build(levels.FOLDER) == {}
    assert set(levels.FOLDER.iterdir()) == {levels.path(name) for name in levels.LEVELS["x86_64"]}
    assert _width() == 8


def test_a_clone_without_its_library_says_how_to_build_it(clone: Path) -> None:
    """One warning with the command, which may be pasted; by name an error. Tests refuse to run."""
    command = shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", "-e", str(clone)])
    for _ in range(2):
        with pytest.raises(UsageError, match="was not built") as caught:
            select_backend("native")
        assert str(caught.value).endswith(command)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert [select_backend().name for _ in range(2)] == ["torch", "torch"]
    assert [str(warning.message) for warning in seen] == [f"{caught.value}\nUsing the torch backend"]
    assert needs.not_built() == str(caught.value)


def test_an_installation_without_a_library_says_so(clone: Path) -> None:
    """As from a wheel that was built without a compiler: there is nothing to build it from but another wheel."""
    (clone / "setup.py").unlink()
    with pytest.raises(UsageError, match=r"this installation has no library .* or take a Linux wheel"):
        library.library()


def test_a_library_that_cannot_be_loaded_is_named() -> None:
    """As where torch has no OpenMP: not an OSError of the loader."""
    levels.build(levels.FOLDER)
    levels.path("avx2").write_bytes(b"no library")
    with pytest.raises(
        UsageError, match=r"avx2-\w+.so does not fit this system, remove it and install megascale again"
    ):
        library.library()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("surely-no-compiler", "No such file"),
        ("false", "exit status 1"),
        ("gcc 'half", "No closing quotation"),
        ("true", "No such file"),
    ],
)
def test_where_a_compiler_fails_there_is_no_library(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not there, fails, is no command, or makes nothing: the reason per level, and nothing left behind."""
    monkeypatch.setenv("CC", compiler)
    failures = levels.build(levels.FOLDER)
    assert failures.keys() == levels.LEVELS["x86_64"].keys()
    assert all(reason in failure for failure in failures.values())
    assert list(levels.FOLDER.iterdir()) == []


def test_another_openmp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clang's calls functions that torch's libgomp has not: the process would die where a step begins."""
    levels.SOURCE.write_text("void __kmpc_fork_call(void);\nvoid update(void) { __kmpc_fork_call(); }\n")
    assert all("another OpenMP" in reason for reason in levels.build(levels.FOLDER).values())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    assert all("there is no C compiler" in reason for reason in levels.build(levels.FOLDER).values())


def test_libraries_bind_to_nothing_but_the_process() -> None:
    """No library and no version of a symbol is named: the process's libc and OpenMP serve, however old."""
    levels.SOURCE.write_text(
        "#include <math.h>\n#include <stdlib.h>\ndouble answer(double x) {\n"
        "#pragma omp parallel for\n    for (int i = 0; i < 9; i++) __atomic_fetch_add((long *)&x, 1, 0);\n"
        '    return pow(x, atof(getenv("PATH")));\n}\n'
    )
    assert levels.build(levels.FOLDER) == {}
    content = levels.path("baseline").read_bytes()
    assert b"GLIBC_" not in content
    assert b"libgomp" not in content
    with pytest.raises(AttributeError, match="measure"):  # all of its symbols were found
        library.load(levels.path("baseline"))
