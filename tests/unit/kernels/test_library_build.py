"""Building native code: the cache may be damaged, locked or out of reach, and a compiler may be anything."""

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from filelock import FileLock

from megascale.kernels import compiler, library_build
from megascale.kernels.compiler import CompilerError, CompilerTimeout, find_compiler
from megascale.kernels.library_build import Recipe, load
from tests.pool import RankPool

NOBODY = 65534
SOURCE = "int answer(void) { return 42; }\n" + "const char filler[20000] = {1};\n"

GCC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(GCC is None, reason="needs a C compiler")


class Build:
    """A small library, its cache folder, and a compiler that counts how often it compiles."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.temporary = folder, folder / "cache", folder / "temporary"
        self.temporary.mkdir()
        self.log = folder / "log"
        self.source = folder / "answer.c"
        self.source.write_text(SOURCE)
        self.compiler = self.script("counting", f'case "$*" in *-c*) echo >> {self.log};; esac; exec {GCC} "$@"')

    def script(self, name: str, text: str) -> Path:
        """Write a program; returns its path."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def library(self, *command: str) -> ctypes.CDLL:
        """Return the library, compiled by ``command``, else by the counting compiler."""
        recipe = Recipe(command or (str(self.compiler),), self.source, ("-fPIC",))
        return load(recipe, ctypes.CDLL)

    def load(self, *command: str) -> int:
        """Return what the library answers."""
        return int(self.library(*command).answer())

    @property
    def libraries(self) -> list[Path]:
        """What is kept."""
        return sorted([*self.cache.rglob("*.so"), *self.temporary.rglob("*.so")])

    @property
    def times_compiled(self) -> int:
        """How often the compiler ran."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """A build whose cache and temporary files are its own."""
    made = Build(tmp_path)
    monkeypatch.setenv(library_build.CACHE_VARIABLE, str(made.cache))
    monkeypatch.setattr("tempfile.tempdir", str(made.temporary))
    return made


def _cut(length: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(length * len(content)) if length < 1 else int(length)])

    return damage


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def _folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


DAMAGES = {
    "empty": _cut(0),
    "a byte": _cut(1),
    "the header": _cut(64),
    "a quarter": _cut(0.25),
    "nine tenths": _cut(0.9),
    "all but little": _cut(0.999),
    "a bit": _flip,
    "garbage": lambda path: path.write_bytes(b"garbage" * 5000),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a folder": _replace(_folder_with_a_file),
    "a link to nothing": _replace(lambda path: path.symlink_to(path.with_name("nothing"))),
    "a pipe": _replace(os.mkfifo),
}


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs modes of files")
def test_folders_that_are_made_are_the_users_alone(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code is loaded from there: nobody else may write, read or list it, whatever the process's mask allows."""
    monkeypatch.delenv(library_build.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        folders = [library_build._cache_folder(), library_build._temporary_folder()]
    finally:
        os.umask(before)
    assert folders[0] == tmp_path / "megascale"
    assert [oct(folder.stat().st_mode & 0o777) for folder in folders if folder] == ["0o700", "0o700"]


@pytest.mark.default("a quarter", "nine tenths", "a link to nothing")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_library_is_compiled_anew(
    damage: Callable[[Path], object], build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that was cut short killed the process when it was loaded, or went unnoticed: now one warning names it,
    and a whole one takes its place. Nor does it harm a process that has it loaded.
    """
    loaded = build.library()
    [library] = build.libraries
    whole = library.read_bytes()
    damage(library)
    with caplog.at_level(logging.WARNING):
        assert build.load() == 42
    assert loaded.answer() == 42
    assert [str(library) in record.getMessage() for record in caplog.records] == [True]
    assert build.libraries == [library]
    assert library.read_bytes() == whole
    assert build.load() == 42
    assert build.times_compiled == 2


@functools.cache
def _gives_files_away() -> bool:
    """Whether this user can make a file another user's: root can, but in containers that know no other user."""
    with tempfile.NamedTemporaryFile() as file:
        try:
            os.chown(file.name, NOBODY, NOBODY)
        except OSError:
            return False
        return True


@contextmanager
def _unprivileged(folder: Path) -> Iterator[None]:
    """Be a user whom permissions bind: ``folder`` and all in it is that user's."""
    if os.geteuid() != 0:
        yield
        return
    if not _gives_files_away():
        pytest.skip("no permission binds root, and this container has no other user")
    parents = [parent for parent in folder.parents if not parent.stat().st_mode & 0o001]
    modes = [(parent, parent.stat().st_mode) for parent in parents]
    for parent in parents:
        parent.chmod(parent.stat().st_mode | 0o011)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in modes:
            parent.chmod(mode)


def test_library_that_may_not_be_read_is_compiled_anew(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """Permissions that somebody has changed: the file is replaced."""
    build.load()
    with _unprivileged(build.folder):
        build.libraries[0].chmod(0)
        assert build.load() == 42
        assert build.load() == 42
    assert build.times_compiled == 2
    assert "Permission denied" in caplog.text


def test_cache_that_cannot_be_written_is_read(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that an administrator has filled serves everyone; nothing is compiled, and nothing left elsewhere."""
    build.load()
    with _unprivileged(build.folder):
        build.cache.chmod(0o555)
        assert build.load() == 42
        assert build.times_compiled == 1
        assert list(build.temporary.iterdir()) == []
        assert caplog.records == []

        build.libraries[0].chmod(0o644)
        build.libraries[0].write_bytes(b"")
        assert build.load() == build.load() == 42
    assert build.times_compiled == 2
    assert "is damaged" in caplog.text
    assert f"{build.libraries[0]} cannot be removed: " in caplog.text


@pytest.mark.parametrize("place", ["/dev/null/cache", "/proc/megascale"])
def test_without_a_cache_folder_one_temporary_folder_is_kept(
    place: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that cannot be written: every process left a folder in the temporary directory, and compiled anew. There
    is one folder for each user, and of no use to others.
    """
    monkeypatch.setenv(library_build.CACHE_VARIABLE, place)
    for _ in range(3):
        assert build.load() == 42
    [folder] = build.temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert build.times_compiled == 1


def _give_away(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)


def _open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


SUSPECT: dict[str, Callable[[Path], object]] = {
    "open to others": _open_to_others,
    "another's": _give_away,
    "a link": lambda folder: folder.symlink_to(folder.parent.parent),
    "a file": lambda folder: folder.touch(),
}


@pytest.mark.default("a file", "another's", "a link")
@pytest.mark.parametrize("make", SUSPECT.values(), ids=SUSPECT.keys())
def test_temporary_folder_that_others_could_write_is_not_used(
    make: Callable[[Path], object], build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may make a folder of any name among temporary files: what lies there could be anybody's code."""
    if make is _give_away and not _gives_files_away():
        pytest.skip("only root gives folders away, where there is another user")
    monkeypatch.setenv(library_build.CACHE_VARIABLE, "/dev/null/cache")
    make(build.temporary / f"megascale-{os.geteuid()}")
    assert build.load() == build.load() == 42
    assert build.libraries == []
    assert len(list(build.temporary.iterdir())) == 1
    assert build.times_compiled == 2


def test_without_a_home_code_is_built(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who is in no list of users, as in many containers, has no home."""
    for variable in (library_build.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert build.load() == 42


@pytest.mark.parametrize(
    "command",
    [
        "{wrapper} {gcc}",
        "{wrapper} {gcc} -pipe -DA='x y'",
        "'{spaced}' -pipe",
        "{spaced}",
        "{spaced} -pipe",
        "{escaped} -pipe",
        "  {gcc}  ",
        "cc -pipe",
    ],
)
def test_compiler_may_be_a_command_with_arguments(command: str, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """CC="ccache gcc" was taken for the name of a program. Quotes are a shell's; a path with spaces needs none."""
    wrapper = build.script("wrapper", 'exec "$@"')
    spaced = build.script("with some spaces/cc", f'exec {GCC} "$@"')
    escaped = str(spaced).replace(" ", "\\ ")
    monkeypatch.setenv("CC", command.format(wrapper=wrapper, gcc=GCC, spaced=spaced, escaped=escaped))
    found = find_compiler("CC", ())
    assert found is not None
    assert build.load(*found) == 42


@pytest.mark.parametrize("given", ["", "   "])
def test_empty_variable_names_no_compiler(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is the first of the usual ones that is there."""
    monkeypatch.setenv("CC", given)
    assert find_compiler("CC", ("surely-no-compiler", "sh")) == (shutil.which("sh"),)
    assert find_compiler("CC", ("surely-no-compiler",)) is None


def test_unbalanced_quote_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a ValueError of the splitting."""
    monkeypatch.setenv("CC", "gcc 'half")
    with pytest.raises(CompilerError, match=r"CC=.*No closing quotation"):
        find_compiler("CC", ())


FAILING = {
    "is not there": ("surely-no-compiler", "surely-no-compiler"),
    "fails": ("echo no such target >&2; exit 3", "exit status 3\nno such target"),
    "writes no text": ("printf '\\377\\376' >&2; exit 1", "exit status 1"),
    "makes nothing": ("exit 0", "No such file"),
    "makes garbage": (
        'while [ "$1" != -o ] && [ $# -gt 1 ]; do shift; done; echo garbage > "${2:-/dev/null}"',
        "answer.c",
    ),
}


@pytest.mark.parametrize("case", FAILING.values(), ids=FAILING.keys())
def test_compiler_that_fails_is_an_error_with_its_output(case: tuple[str, str], build: Build) -> None:
    """One kind of error, whatever went wrong; nothing of it is kept."""
    text, message = case
    command = text if text == "surely-no-compiler" else str(build.script("cc", text))
    with pytest.raises(CompilerError) as caught:
        build.load(command)
    assert message in str(caught.value)
    assert build.libraries == []


def test_compiler_that_hangs_is_ended(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it has started, which would hold its pipes open; its wrapper ends at once on a signal."""
    pid = build.folder / "pid"
    hanging = build.script("cc", f'case "$*" in *--version*) exit;; esac\nsleep 1000 & echo $! > {pid}; wait')
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    with pytest.raises(CompilerTimeout, match=r"did not end within 0\.5 s"):
        build.load(str(hanging))
    _wait_for_end(int(pid.read_text()))


def _wait_for_end(pid: int) -> None:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"process {pid} lives on")


def test_compiler_that_warns_compiles(build: Build) -> None:
    """What it prints beside its work is no failure."""
    warning = build.script("cc", f'echo "cc: warning: old" >&2; echo news; exec {GCC} "$@"')
    assert build.load(str(warning)) == 42


def test_lock_that_a_dead_process_left_holds_nobody(build: Build) -> None:
    """The file stays, the lock does not."""
    code = "import os, sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); os._exit(1)"
    build.load()
    [lock] = build.cache.glob("*.lock")
    subprocess.run([sys.executable, "-c", code, str(lock)], check=False, timeout=60)
    assert lock.exists()
    build.libraries[0].unlink()
    assert build.load() == 42


def test_lock_of_a_process_that_hangs_is_passed_by(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process would keep all others of the machine waiting for ever."""
    build.load()
    [lock] = build.cache.glob("*.lock")
    build.libraries[0].unlink()
    monkeypatch.setattr(library_build, "LOCK_SECONDS", 0.2)
    code = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert build.load() == 42
        assert build.load() == 42
        other.kill()
    assert "cannot be locked" in caplog.text
    assert build.times_compiled == 2


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/dev/null/lock")], ids=["folder", "link"])
def test_where_files_cannot_be_locked_code_is_built(make: Callable[[Path], object], build: Build) -> None:
    """Some network file systems know no locks; each process then compiles."""
    stem = Recipe((str(build.compiler),), build.source, ("-fPIC",)).stem()
    build.cache.mkdir()
    make(build.cache / f"{stem}.lock")
    assert build.load() == build.load() == 42
    assert build.times_compiled == 1


def _load_together(build: Build) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library_build.CACHE_VARIABLE, str(build.cache))
        dist.barrier()
        return build.load()


@pytest.mark.slow
def test_processes_that_begin_together_compile_once(
    build: Build, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a machine start at the same moment; one compiles, the others wait and load the same file."""
    monkeypatch.setattr("tempfile.tempdir", None)  # the path of a socket of the ranks' has at most 107 bytes
    assert ranks.run(3, _load_together, build) == [42] * 3
    assert build.times_compiled == 1


def test_cached_library_is_not_locked(build: Build) -> None:
    """Who finds a library waits for nobody."""
    build.load()
    [lock] = build.cache.glob("*.lock")
    with FileLock(lock):
        assert build.load() == 42


TRAINING = """
import torch
from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
params = [torch.nn.Parameter(torch.ones(5, dtype=torch.float16)) for _ in range(3)]
config = OptimizerConfig(fp16=True, backend="native")
scaler = DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 9, 1)
optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5), config, scaler)
for param in params:
    param.grad = (torch.full_like(param, 0.1) * optimizer.get_loss_scale()).half()
optimizer.step()
print([param.tolist() for param in params])
"""


@pytest.mark.release
def test_training_survives_damaged_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our library, cut short between two processes: the second trains, and its log names it."""
    monkeypatch.setenv(library_build.CACHE_VARIABLE, str(tmp_path))
    command = [sys.executable, "-c", TRAINING]
    first = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    libraries = sorted(tmp_path.glob("*.so"))
    for library in libraries:
        _cut(0.3)(library)
    second = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    assert first.stdout == second.stdout
    assert first.stderr == ""
    assert [library.name.split("-")[0] for library in libraries] == ["native"]
    assert all(f"{library} is damaged" in second.stderr for library in libraries)
