"""The levels of CPUs that native.c is compiled for where a wheel is built, and the libraries' names.

setup.py runs this file by its path: it needs nothing but the standard library.
"""

import hashlib
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("native.c")
HEADERS = "".join(header.read_text() for header in sorted(SOURCE.parent.glob("*.h")))
FOLDER = Path(__file__).with_name("prebuilt")
"""Where a wheel has the libraries; a clone has no such folder."""
CPUINFO = Path("/proc/cpuinfo")

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

NAMES = tuple(dict.fromkeys(name for levels in LEVELS.values() for name in levels))


def levels_here() -> dict[str, Level]:
    """Return the levels of this kind of machine, the least first: none but on Linux."""
    return LEVELS.get(platform.machine(), {}) if platform.system() == "Linux" else {}


def supported() -> list[str]:
    """Return the names of the levels that this CPU has, the highest first."""
    features = _features()
    return [name for name, level in reversed(levels_here().items()) if level.features <= features]


def _features() -> frozenset[str]:
    """Return what the kernel lets programs use of this CPU."""
    try:
        found = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return frozenset(found[1].split()) if found else frozenset()


def commands(compiler: Sequence[str], name: str, target: Path) -> list[list[str]]:
    """Return the commands that make a level's library of native.c: compile, then link.

    The first has -fopenmp; the second would name a runtime for it, while the process has torch's.
    """
    compiled = str(target.with_suffix(".o"))
    return [
        [*compiler, *_flags(name), "-c", str(SOURCE), "-o", compiled],
        [*compiler, compiled, "-o", str(target), *LINK_FLAGS],
    ]


def stem(name: str) -> str:
    """Return the first half of a library's name: the level, and the digest of all that the library is made of."""
    made_of = [SOURCE.read_text(), HEADERS, platform.machine(), *_flags(name), *LINK_FLAGS]
    return f"{name}-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:24]}"


def file_name(name: str, content: bytes) -> str:
    """Return a library's name. A file of another name is of other sources, or damaged."""
    return f"{stem(name)}-{hashlib.sha256(content).hexdigest()[:24]}.so"


def _flags(name: str) -> tuple[str, ...]:
    return (*FLAGS, *levels_here()[name].flags, "-fopenmp")
