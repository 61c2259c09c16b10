"""The libraries that a wheel brings: which one is loaded, and that none is loaded that is stale or damaged."""

import ctypes
import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.errors import ArgumentError, UsageError
from megascale.kernels import library_build
from megascale.kernels.compiler import find_compiler
from megascale.kernels.native import levels
from megascale.kernels.native import library as native_library

COMPILER = find_compiler("CC", ("cc", "gcc", "clang"))
pytestmark = [
    pytest.mark.c_compiler,
    pytest.mark.skipif("avx2" not in levels.supported(), reason="needs an x86-64 CPU with AVX2"),
]
SOURCE = "int answer(void) { return 42; }\n"
BELOW = ["avx2", "baseline"]


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Where the wheel's libraries would be: of a small source, on a CPU without AVX-512, and tried anew."""
    (tmp_path / "answer.c").write_text(SOURCE)
    (tmp_path / "prebuilt").mkdir()
    (tmp_path / "cpuinfo").write_text(
        f"processor: 0\nflags\t\t: {' '.join(levels.LEVELS['x86_64']['avx2'].features)}\n"
    )
    monkeypatch.setattr(levels, "SOURCE", tmp_path / "answer.c")
    monkeypatch.setattr(levels, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setattr(levels, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(native_library, "SOURCE", tmp_path / "answer.c")
    monkeypatch.setattr(native_library, "_declare", lambda loaded: loaded)
    monkeypatch.setenv(library_build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(native_library.ENVIRONMENT_VARIABLE, raising=False)
    caplog.set_level(logging.INFO)
    native_library._outcome.cache_clear()
    yield
    native_library._outcome.cache_clear()


def _made(*names: str) -> list[Path]:
    """Compile the libraries of levels, as setup.py does."""
    made = []
    for name in names:
        target = levels.FOLDER / "made.so"
        for command in levels.commands(COMPILER or (), name, target):
            subprocess.run(command, check=True, timeout=60)
        made.append(target.rename(levels.FOLDER / levels.file_name(name, target.read_bytes())))
        target.with_suffix(".o").unlink()
    return made


def _loaded(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return which of the wheel's libraries were loaded, by the log."""
    return [name for name in levels.NAMES if f"native.c's library {name}, of the wheel" in caplog.messages]


def test_the_highest_level_of_this_cpu_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """Of three libraries the CPU has two levels; none above is loaded, nor one below."""
    _made("baseline", "avx2", "avx512")
    assert native_library.load_highest().answer() == 42
    assert _loaded(caplog) == ["avx2"]


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


def test_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources, headers and flags are in the name: a library that is left of others is none."""
    _made("avx2")
    whole = {attribute: getattr(levels, attribute) for attribute in ("HEADERS", "FLAGS", "LINK_FLAGS")}
    for attribute, value in {"HEADERS": " ", "FLAGS": ("-O1",), "LINK_FLAGS": ("-lm",)}.items():
        monkeypatch.setattr(levels, attribute, value)
        with pytest.raises(UsageError, match="no library 'avx2' came with this installation"):
            native_library.load_prebuilt("avx2")
        monkeypatch.setattr(levels, attribute, whole[attribute])
    levels.SOURCE.write_text(SOURCE + " ")
    with pytest.raises(UsageError, match="no library for this machine"):
        native_library.load_highest()
    levels.SOURCE.write_text(SOURCE)
    assert native_library.load_prebuilt("avx2").answer() == 42


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a bit": lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_library_is_named_and_a_lower_one_serves(
    damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """It is found out before it is loaded, which could kill the process. It stays where it is: pip has put it there."""
    _, damaged = _made("baseline", "avx2")
    damaged.write_bytes(damage(damaged.read_bytes()))
    with pytest.raises(UsageError, match=r"avx2.*is damaged.*reinstall megascale"):
        native_library.load_prebuilt("avx2")
    assert native_library.load_highest().answer() == 42
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert _loaded(caplog) == ["baseline"]
    assert str(damaged) in caplog.text
    assert damaged.exists()


def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def test_a_compiler_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    """What is compiled here is made for this very CPU."""
    _made("baseline", "avx2")
    assert native_library.library().answer() == 42
    assert _loaded(caplog) == []


def test_without_a_compiler_the_wheels_library_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is warned of: nothing is wrong."""
    _made("baseline", "avx2")
    _no_compiler(monkeypatch)
    assert native_library.library().answer() == 42
    assert _loaded(caplog) == ["avx2"]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_where_the_compiler_fails_the_wheels_library_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with gcc and without libc's headers; one warning has the compiler's output."""
    _made("baseline")
    monkeypatch.setenv("CC", "false")
    assert native_library.library().answer() == 42
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert _loaded(caplog) == ["baseline"]
    assert "false" in record.getMessage()
    assert "Using the library that the wheel brought" in record.getMessage()


def test_without_either_both_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedies are a compiler or a wheel."""
    _no_compiler(monkeypatch)
    with pytest.raises(UsageError, match=r"needs a C compiler; install(.|\n)*a wheel for Linux brings some"):
        native_library.library()


@pytest.mark.parametrize("name", BELOW)
def test_level_is_forced_by_the_variable(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where there is a compiler."""
    _made("baseline", "avx2")
    monkeypatch.setenv(native_library.ENVIRONMENT_VARIABLE, name)
    assert native_library.library().answer() == 42
    assert _loaded(caplog) == [name]


def test_variable_that_cannot_be_followed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown value, a level that the CPU has not, one that did not come, and a compiler that is not there."""
    _made("baseline", "avx512")
    _no_compiler(monkeypatch)
    for value, kind, message in (
        ("avx", ArgumentError, "MEGASCALE_NATIVE_LIBRARY must be one of .*'baseline'.*got 'avx'"),
        ("avx512", UsageError, r"cannot run native.c's library 'avx512'.*\['avx2', 'baseline'\]"),
        ("avx2", UsageError, "no library 'avx2' came with"),
        ("compiled", UsageError, "needs a C compiler; install gcc or clang, or set CC$"),
    ):
        monkeypatch.setenv(native_library.ENVIRONMENT_VARIABLE, value)
        with pytest.raises(kind, match=message):
            native_library.library()


def test_libraries_bind_to_nothing_but_the_process() -> None:
    """No library and no version of a symbol is named: the process's libc and OpenMP serve, however old."""
    levels.SOURCE.write_text(
        "#include <math.h>\n#include <stdlib.h>\ndouble answer(double x) {\n"
        "#pragma omp parallel for\n    for (int i = 0; i < 9; i++) __atomic_fetch_add((long *)&x, 1, 0);\n"
        '    return pow(x, atof(getenv("PATH")));\n}\n'
    )
    [made] = _made("baseline")
    assert b"GLIBC_" not in made.read_bytes()
    assert b"libgomp" not in made.read_bytes()
    library_build.share_openmp()
    ctypes.CDLL(str(made))
