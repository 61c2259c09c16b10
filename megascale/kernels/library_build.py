"""Compiles native code once per machine and loads it into this process.

Libraries are cached in MEGASCALE_CACHE_DIR, else in the user's cache folder. The first half of a library's file name
identifies everything that it depends on, the second is the checksum of its content: loading a truncated file can kill
the process, so each file is checked first. Libraries use torch's OpenMP threads: a second pool would compete for cores.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megascale.kernels.compiler import Command, CompilerError, compiler_version, run_compiler
from megascale.utils import announce

CACHE_VARIABLE = "MEGASCALE_CACHE_DIR"
OPENMP = re.compile(r"/\S*/lib(?:gomp|omp|iomp5)[^/]*\.(?:so|dylib)\S*")
LOCK_SECONDS = 600.0
"""How long to wait for another process that compiles the same library, in seconds; then it is taken to hang."""

logger = logging.getLogger(__name__)
Library = TypeVar("Library", bound=ctypes.CDLL)


@dataclass(frozen=True)
class Recipe:
    """How to build a library.

    Attributes:
        depends: files on which the result depends beside source, compiler, flags and CPU.
        seconds: how long it takes on an idle core, about.
    """

    compiler: Command
    source: Path
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    seconds: int = 0

    def stem(self) -> str:
        """Return the first half of the library's file name.

        Raises CompilerError if the compiler does not tell its version.
        """
        described = [self.source.read_text(), *self.compiler, *self.compile_flags, *self.link_flags, *self.depends]
        described += [platform.machine(), _processor(), compiler_version(self.compiler)]
        return f"{self.source.stem}-{hashlib.sha256(chr(0).join(described).encode()).hexdigest()[:24]}"

    def compile(self, scratch: Path) -> Path:
        """Compile into the folder ``scratch`` and return the library's path.

        Raises CompilerError.
        """
        compiled, linked = scratch / "compiled.o", scratch / "linked.so"
        run_compiler([*self.compiler, *self.compile_flags, "-c", str(self.source), "-o", str(compiled)])
        run_compiler([*self.compiler, "-shared", str(compiled), "-o", str(linked), *self.link_flags])
        return linked


def share_openmp() -> str | None:
    """Make torch's OpenMP library visible to libraries that are loaded later. Returns its path."""
    try:
        found = OPENMP.search(Path("/proc/self/maps").read_text())
        if found is None:
            return None
        ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return found[0]


def load(recipe: Recipe, open_library: Callable[[str], Library]) -> Library:
    """Return a library, from the cache if an intact one is there, else compiled and cached for other processes.

    A damaged one is replaced, with a warning in the log. If the cache cannot be written, new libraries go to a private
    folder among the temporary files.

    Args:
        open_library: loads a library from a path, such as ctypes.CDLL.

    Raises CompilerError if the compiler fails, with its output, or if its result cannot be loaded.
    """
    stem = recipe.stem()
    folder = _cache_folder()
    found = _cached(folder, stem, open_library)
    if found is not None:
        return found
    if folder is None or not _is_writable(folder):
        folder = _temporary_folder()
    try:
        return _compiled(recipe, stem, folder, open_library)
    except OSError as error:
        raise CompilerError(f"{recipe.source.name}, with {shlex.join(recipe.compiler)}: {error}") from error


def load_kept(recipe: Recipe, open_library: Callable[[str], Library]) -> Library | None:
    """Return a library if an intact one is in the cache, else None.

    Raises CompilerError if the compiler does not tell its version.
    """
    return _cached(_cache_folder(), recipe.stem(), open_library)


def read_file(path: Path) -> bytes:
    """Return a file's content.

    Raises OSError, also for anything but a regular file: reading a pipe would not end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a file")
    return path.read_bytes()


def open_in_memory(content: bytes, path: Path, open_library: Callable[[str], Library]) -> Library:
    """Load a library from memory where possible: truncating its file would kill the processes that use it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(path.stem)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(content)
            # Stays open: the loader identifies libraries by path, so another file must not get this one.
            return open_library(f"/proc/self/fd/{descriptor}")
        except OSError:  # the system forbids executing this memory
            os.close(descriptor)
    return open_library(str(path))


def _cached(folder: Path | None, stem: str, open_library: Callable[[str], Library]) -> Library | None:
    """Return the library if an intact one is in ``folder`` and can be loaded. Damaged files are removed."""
    for path in sorted(folder.glob(f"{stem}-*.so")) if folder else ():
        try:
            content = read_file(path)
            if path.stem == f"{stem}-{_checksum(content)}":
                return open_in_memory(content, path, open_library)
            reason = "its content is not what was written there"
        except OSError as error:
            reason = str(error)
        logger.warning("%s is damaged, and is compiled anew: %s", path, reason)
        _remove(path)
    return None


def _compiled(recipe: Recipe, stem: str, folder: Path | None, open_library: Callable[[str], Library]) -> Library:
    """Compile and load a library, cached in ``folder`` unless that is None. Of several processes, one compiles."""
    with _locked(folder and folder / f"{stem}.lock"):
        found = _cached(folder, stem, open_library)
        if found is not None:
            return found
        announce.here(lambda: _compiling(recipe, folder))
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
            linked = recipe.compile(Path(scratch))
            content = read_file(linked)
            made = open_in_memory(content, linked, open_library)  # cached only if it loads
            if folder is not None:
                _keep(linked, folder / f"{stem}-{_checksum(content)}.so")
        return made


def _compiling(recipe: Recipe, folder: Path | None) -> str:
    kept = "kept nowhere, as no folder can be written" if folder is None else f"kept in {folder}"
    return (
        f"compiling {recipe.source.name} with {shlex.join(recipe.compiler)}, once for this kind of machine: about "
        f"{recipe.seconds} s on an idle core, longer on a busy one; {kept}"
    )


def _keep(linked: Path, target: Path) -> None:
    try:
        os.replace(linked, target)
    except OSError as error:
        logger.warning("%s cannot be kept, each process compiles it anew: %s", target, error)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


@contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Lock out other processes of this machine that compile the same. Does nothing where files cannot be locked."""
    from filelock import FileLock  # torch's own dependency

    lock = None if path is None else FileLock(path)
    try:
        if lock is not None:
            lock.acquire(timeout=LOCK_SECONDS)
    except (OSError, NotImplementedError) as error:  # also a time-out
        logger.warning("%s cannot be locked, other processes may compile the same: %s", path, error)
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _cache_folder() -> Path | None:
    """Return the cache folder, created if it is missing; None if that fails."""
    given = os.environ.get(CACHE_VARIABLE)
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(given) if given else root / "megascale"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a user without a home
        return None
    return folder


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _temporary_folder() -> Path | None:
    """Return this user's private folder among the temporary files, the same one in every process.

    Others may have created it: None if it is not the user's, or others may write to it.
    """
    if not hasattr(os, "geteuid"):
        return None
    folder = Path(tempfile.gettempdir()) / f"megascale-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if is_own else None


def _processor() -> str:
    """Return what -march=native depends on: machines with different CPUs may share a cache folder."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = re.compile(r"^(model name|flags|Features|CPU part)\s*:.*$", re.MULTILINE)
    return "\n".join(dict.fromkeys(line.group() for line in wanted.finditer(text)))
