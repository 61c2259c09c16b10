"""The machine's compiler: which command it is, and how it is run.

A command is what a shell would take it for, such as ``ccache gcc`` or ``"/my tools/g++" -pipe``. It never waits for
input, and one that takes too long is ended, with all that it started.
"""

import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence

from megascale.errors import UsageError

VERSION_SECONDS = 60.0
COMPILE_SECONDS = 600.0
"""How long a compiler may take: tensor_reader.cpp takes 20 s on an idle core."""

Command = tuple[str, ...]


class CompilerError(UsageError):
    """A compiler could not be run, or failed; says how."""


class CompilerTimeout(CompilerError):
    """A compiler did not end in time: it is not worth another try with other flags."""


def find_compiler(variable: str, commands: Sequence[str]) -> Command | None:
    """Return the command that an environment variable holds, else the first of ``commands`` that is there.

    Raises CompilerError for a variable that is no command, such as one with an unbalanced quote.
    """
    given = os.environ.get(variable, "").strip()
    if given:
        return _words(variable, given)
    found = next(filter(None, map(shutil.which, commands)), None)
    return None if found is None else (found,)


def _words(variable: str, given: str) -> Command:
    """Split as a shell does, but for a path with spaces that nobody has quoted."""
    parts = given.split(" ")
    for length in range(len(parts), 1, -1):
        path = " ".join(parts[:length])
        if os.path.isabs(path) and shutil.which(path):
            return (path, *_split(variable, " ".join(parts[length:])))
    return _split(variable, given)


def _split(variable: str, text: str) -> Command:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise CompilerError(
            f"{variable}={os.environ[variable]!r} is no command: {error}; correct or unset it"
        ) from None


def machine_flag() -> str:
    """Return the flag that makes a compiler use all that this machine's CPU has."""
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def compiler_version(compiler: Command) -> str:
    """Return what a compiler tells of itself.

    Raises CompilerError.
    """
    return run_compiler([*compiler, "--version"], VERSION_SECONDS)


def run_compiler(command: Sequence[str], seconds: float | None = None) -> str:
    """Run a compiler, for at most ``seconds``, else COMPILE_SECONDS. Returns what it printed.

    Raises:
        CompilerTimeout: it took longer.
        CompilerError: it could not be started, or failed; with what it wrote.
    """
    seconds = COMPILE_SECONDS if seconds is None else seconds
    try:
        # A group of its own: what a wrapper such as ccache has started must end with it, else its pipes stay open.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise CompilerError(f"{shlex.join(command)}: {error}") from error
    with process:
        try:
            printed, complaints = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise CompilerTimeout(f"{shlex.join(command)}: did not end within {seconds:g} s") from None
        finally:
            if process.returncode is None:
                _end(process)
    if process.returncode != 0:
        raise CompilerError(f"{shlex.join(command)}: exit status {process.returncode}\n{complaints}".rstrip())
    return printed


def _end(process: "subprocess.Popen[str]") -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
