"""Builds native code with the machine's compiler, once.

A shared library lies in MEGASCALE_CACHE_DIR, else in the user's cache folder, under a name made of everything that it
depends on. It shares torch's OpenMP threads: a second pool would compete with the first for the cores.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "MEGASCALE_CACHE_DIR"
OPENMP = re.compile(r"/\S*/lib(?:gomp|omp|iomp5)[^/]*\.(?:so|dylib)\S*")


def find_compiler(variable: str, commands: Sequence[str]) -> str | None:
    """Return the compiler that an environment variable names, else the first of ``commands`` that is there."""
    return os.environ.get(variable) or next(filter(None, map(shutil.which, commands)), None)


def machine_flag() -> str:
    """Return the flag that makes a compiler use all that this machine's CPU has."""
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def share_openmp() -> str | None:
    """Let libraries that are loaded from now on see the OpenMP that torch has loaded. Returns its path."""
    try:
        found = OPENMP.search(Path("/proc/self/maps").read_text())
    except OSError:
        return None
    if found is None:
        return None
    ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)
    return found[0]


def build(compiler: str, source: Path, compile_flags: Sequence[str], link_flags: Sequence[str], *depends: str) -> Path:
    """Return the shared library's path; compiles where it is not there yet.

    Args:
        depends: what else the result depends on, besides source, compiler, flags and CPU.

    Raises subprocess.CalledProcessError, with the compiler's output, or OSError.
    """
    described = [source.read_text(), compiler, *compile_flags, *link_flags, *depends]
    described += [platform.machine(), _processor(), _version(compiler)]
    name = hashlib.sha256("\0".join(described).encode()).hexdigest()[:24]
    folder = _cache_folder()
    target = folder / f"{source.stem}-{name}.so"
    if target.exists():
        return target
    with _alone(target), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not target.exists():
            compiled, linked = Path(scratch) / "compiled.o", Path(scratch) / "linked.so"
            _run(compiler, *compile_flags, "-c", str(source), "-o", str(compiled))
            _run(compiler, "-shared", str(compiled), "-o", str(linked), *link_flags)
            os.replace(linked, target)
    return target


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Keep other ranks of this machine from compiling the same. Where files cannot be locked, all may: the last one's
    library stays.
    """
    from filelock import FileLock  # torch's own dependency

    lock = FileLock(target.with_suffix(".lock"))
    try:
        lock.acquire()
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _cache_folder() -> Path:
    """Return a folder of the user's own; a new one where that cannot be."""
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
