"""Finds and runs the machine's compiler.

A command is split as a shell would, such as ``ccache gcc`` or ``"/my tools/g++" -pipe``. It gets no input, and is
killed with its children if it takes too long.
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
"""Time limit of a compiler, in seconds: native.c takes some seconds on an idle core."""

Command = tuple[str, ...]


class CompilerError(UsageError):
    """A compiler could not be run, or failed; the message says why."""


class CompilerTimeout(CompilerError):
    """A compiler exceeded its time limit: do not try again with other flags."""


def find_compiler(variable: str, commands: Sequence[str]) -> Command | None:
    """Return the command that an environment variable holds, else the first of ``commands`` that exists.

    Raises CompilerError for a variable that is no command, such as one with an unbalanced quote.
    """
    given = os.environ.get(variable, "").strip()
    if given:
        return _words(variable, given)
    found = next(filter(None, map(shutil.which, commands)), None)
    return None if found is None else (found,)


def _words(variable: str, given: str) -> Command:
    """Split as a shell does, except that an existing path with unquoted spaces is one word."""
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
    """Return the flag that makes a compiler use all instructions of this machine's CPU."""
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def compiler_version(compiler: Command) -> str:
    """Return what a compiler prints for ``--version``.

    Raises CompilerError.
    """
    return run_compiler([*compiler, "--version"], VERSION_SECONDS)


def run_compiler(command: Sequence[str], seconds: float | None = None) -> str:
    """Run a compiler, for at most ``seconds``, else COMPILE_SECONDS. Returns what it printed.

    Raises:
        CompilerTimeout: it took longer.
        CompilerError: it could not be started, or failed; with its output.
    """
    seconds = COMPILE_SECONDS if seconds is None else seconds
    try:
        # In its own process group: children of a wrapper such as ccache must end too, else its pipes stay open.
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
                _kill(process)
    if process.returncode != 0:
        raise CompilerError(f"{shlex.join(command)}: exit status {process.returncode}\n{complaints}".rstrip())
    return printed


def _kill(process: "subprocess.Popen[str]") -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
