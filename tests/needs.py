"""What tests need of the machine: where it is missing they are skipped, and the reason says what to install.

A test that has a mark of :data:`MARKS` needs what the mark says. So does one case of many, if ``"native"`` is among its
parameters.
"""

import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from megascale.errors import MegascaleError
from megascale.kernels.native import levels
from megascale.kernels.native.library import library

COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
SUFFIXES = {"CC": ".c", "CXX": ".cpp"}


def without_accelerator() -> str | None:
    """Return why tests of the accelerator are skipped; None where there is one."""
    return None if torch.accelerator.is_available() else "needs an accelerator"


def without_native() -> str | None:
    """Return why there is no library of native.c; None where there is one."""
    try:
        library()
    except MegascaleError as error:
        return str(error)
    return None


def not_built() -> str | None:
    """Return how to build native.c's library where it is missing, or of other sources, and could be built; else None.

    Tests would pass on another backend than the one that they are about.
    """
    reason = without_native()
    return reason if reason and levels.levels_here() and without_c() is None else None


def compiler(variable: str) -> list[str]:
    """Return the command in an environment variable, CC or CXX, else the first usual one; empty if there is none."""
    found = filter(None, map(shutil.which, COMPILERS[variable]))
    return shlex.split(os.environ.get(variable, "")) or list(found)[:1]


def without_c() -> str | None:
    """Return why C cannot be compiled; None where it can."""
    return _without("CC")


def without_cxx() -> str | None:
    """Return why C++ cannot be compiled; None where it can."""
    return _without("CXX")


MARKS: dict[str, Callable[[], str | None]] = {
    "gpu": without_accelerator,
    "native": without_native,
    "c_compiler": without_c,
}
"""For each mark what tells whether the machine has it. It is asked when the first test needs the answer."""


def missing(item: pytest.Item) -> str | None:
    """Return why a test cannot run here; None where it can."""
    needs = {mark.name for mark in item.iter_markers() if mark.name in MARKS}
    if "native" in _strings(getattr(getattr(item, "callspec", None), "params", {}).values()):
        needs.add("native")
    return next(filter(None, (MARKS[name]() for name in sorted(needs))), None)


def _strings(values: Iterable[object]) -> set[str]:
    found: set[str] = set()
    for value in values:
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, list | tuple | set | frozenset):
            found |= _strings(value)
    return found


@functools.cache
def _without(variable: str) -> str | None:
    if not compiler(variable):
        return f"needs a compiler: none of {', '.join(COMPILERS[variable])} is there"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty" + SUFFIXES[variable])
        source.write_text("int main(void) { return 0; }\n")
        command = [*compiler(variable), str(source), "-o", f"{folder}/empty"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            return f"needs a compiler that works: {variable}: {error}"
        return None if Path(folder, "empty").exists() else f"needs a compiler that works: {variable}"
