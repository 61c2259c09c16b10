"""Builds native.c with the machine's C compiler, once, and loads it.

The shared library lies in MEGASCALE_CACHE_DIR, else in the user's cache folder, under a name made of everything that it
depends on. It shares torch's OpenMP threads: a second pool would compete with the first for the cores.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megascale.errors import UsageError

SOURCE = Path(__file__).with_name("native.c")
CACHE_VARIABLE = "MEGASCALE_CACHE_DIR"
# No fast math and no contraction: main params are the reference's bits.
FLAGS = ("-std=c11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
OPENMP = re.compile(r"/\S*/lib(?:gomp|omp|iomp5)[^/]*\.(?:so|dylib)\S*")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, built if need be.

    Raises:
        UsageError: there is no C compiler, or it fails; says how.
    """
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise UsageError("the native backend needs a C compiler; install gcc or clang, or set CC")
    errors = []
    for flags in _flags():
        try:
            return _declare(ctypes.CDLL(str(_built(compiler, flags))))
        except (OSError, subprocess.CalledProcessError) as error:
            output = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
            errors.append(f"{compiler} {' '.join(flags)}: {error} {output}".strip())
    raise UsageError("native.c cannot be built; set CC to a working C compiler:\n" + "\n".join(errors))


def _flags() -> Iterator[tuple[str, ...]]:
    """Yield what to try, best first."""
    machine = ("-mcpu=native",) if platform.machine() in ("arm64", "aarch64") else ("-march=native",)
    if _share_openmp():
        yield (*FLAGS, *machine, "-fopenmp")
    yield (*FLAGS, *machine)
    yield FLAGS


def _share_openmp() -> str | None:
    """Let libraries that are loaded from now on see the OpenMP that torch has loaded. Returns its path."""
    try:
        found = OPENMP.search(Path("/proc/self/maps").read_text())
    except OSError:
        return None
    if found is None:
        return None
    ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)
    return found[0]


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    """Return the library's path; compiles where it is not there yet."""
    described = [SOURCE.read_text(), compiler, *flags, platform.machine(), _processor(), _version(compiler)]
    name = hashlib.sha256("\0".join(described).encode()).hexdigest()[:24]
    folder = _cache_folder()
    target = folder / f"native-{name}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch) / "native.o", Path(scratch) / "native.so"
        _run(compiler, *flags, "-c", str(SOURCE), "-o", str(compiled))
        # Without -fopenmp: it would name a runtime of the compiler's own.
        _run(compiler, "-shared", str(compiled), "-o", str(linked), "-lm")
        # Other ranks may do the same at the same time.
        os.replace(linked, target)
    return target


def _cache_folder() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else root / "megascale"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="megascale-"))


def _processor() -> str:
    """Return what -march=native depends on: a cache folder may be shared by unlike machines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = re.compile(r"^(model name|flags|Features|CPU part)\s*:.*$", re.MULTILINE)
    return "\n".join(dict.fromkeys(line.group() for line in wanted.finditer(text)))


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    loaded.measure.argtypes = [pointer, count, count, count, pointer, pointer, ctypes.c_int]
    loaded.measure.restype = None
    loaded.update.argtypes = [pointer, count, count, count, pointer, pointer, pointer, pointer, ctypes.c_int]
    loaded.update.restype = None
    return loaded
