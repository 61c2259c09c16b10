"""The levels of CPUs that native.c is compiled for when megascale is installed, and how: one library per level.

setup.py runs this file by its path, and so may you where there is no package index: it needs nothing but the standard
library. The name of a library has a hash of all that it is made of, so that none is loaded beside other sources.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("native.c")
HEADERS = "".join(header.read_text() for header in sorted(SOURCE.parent.glob("*.h")))
FOLDER = Path(__file__).with_name("libraries")
"""Where the libraries are, in an installation as in a clone."""
CPUINFO = Path("/proc/cpuinfo")
COMPILE_SECONDS = 600

# No fast math and no contraction: main params are the reference's bits.
FLAGS = ("-std=c11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# Linked with nothing that is loaded: symbols without a version are found in the process, whatever its libc and OpenMP.
LINK_FLAGS = ("-shared", "-s", "-nostdlib", "-lgcc")


class Level(NamedTuple):
    """What a library asks of a CPU.

    Attributes:
        flags: the compiler's.
        features: what /proc/cpuinfo must tell.
    """

    flags: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()


_V3 = frozenset(
    "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pni popcnt sse4_1 sse4_2 ssse3 xsave".split()  # noqa: SIM905
)
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

LEVELS: dict[str, dict[str, Level]] = {
    "x86_64": {
        "baseline": Level(("-march=x86-64",)),
        "avx2": Level(("-march=x86-64-v3",), _V3),
        "avx512": Level(("-march=x86-64-v4",), _V4),
    },
    "aarch64": {"baseline": Level()},
}
"""By platform.machine() and name, the least first."""


def levels_here() -> dict[str, Level]:
    """Return the levels of this kind of machine, the least first: none but on Linux."""
    return LEVELS.get(platform.machine(), {}) if platform.system() == "Linux" else {}


def supported() -> list[str]:
    """Return the names of the levels that this CPU has, the highest first."""
    try:  # what the kernel lets programs use of this CPU
        found = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    features = set(found[1].split()) if found else set()
    return [name for name, level in reversed(levels_here().items()) if level.features <= features]


def path(name: str, folder: Path | None = None) -> Path:
    """Return where a level's library is, of these sources and flags, whether or not it was built."""
    made_of = [SOURCE.read_text(), HEADERS, platform.machine(), *_flags(name), *LINK_FLAGS]
    return (folder or FOLDER) / f"{name}-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:24]}.so"


def build(folder: Path) -> dict[str, str]:
    """Compile native.c into ``folder`` for each level of this kind of machine, and remove libraries of other sources.

    A library that is there already is left: its name tells that it is made of the same.

    Returns:
        Why there is no library, for each level that has none. What the compiler printed is on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(levels_here())
    with ThreadPoolExecutor() as pool:
        failures = dict(zip(names, pool.map(lambda name: _built(path(name, folder)), names), strict=True))
    current = {path(name, folder) for name in names}
    for library in set(folder.glob("*.so")) - current:
        library.unlink()
    return {name: reason for name, reason in failures.items() if reason is not None}


def _built(target: Path) -> str | None:
    """Compile a level's library, unless it is there. Returns why that failed."""
    if target.exists():
        return None
    try:
        found = filter(None, map(shutil.which, ("cc", "gcc", "clang")))
        if not (compiler := shlex.split(os.environ.get("CC", "")) or list(found)[:1]):
            raise OSError("there is no C compiler; install gcc, or set CC")
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            library = Path(scratch, "library")
            for command in commands(compiler, target.name.partition("-")[0], library):
                subprocess.run(command, check=True, timeout=COMPILE_SECONDS)
            if b"__kmpc_" in library.read_bytes():
                raise ValueError("it calls another OpenMP than torch's libgomp; set CC to gcc")
            library.replace(target)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def commands(compiler: Sequence[str], name: str, target: Path) -> list[list[str]]:
    """Return the commands that make a level's library of native.c: compile, then link.

    The first has -fopenmp; the second would name a runtime for it, while the process has torch's.
    """
    compiled = str(target.with_suffix(".o"))
    return [
        [*compiler, *_flags(name), "-c", str(SOURCE), "-o", compiled],
        [*compiler, compiled, "-o", str(target), *LINK_FLAGS],
    ]


def _flags(name: str) -> tuple[str, ...]:
    return (*FLAGS, *levels_here()[name].flags, "-fopenmp")


if __name__ == "__main__":
    sys.exit("\n".join(f"{name}: {reason}" for name, reason in build(FOLDER).items()) or 0)
