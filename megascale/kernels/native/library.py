"""The native library: of those that were built when megascale was installed, the one for this CPU, loaded.

It uses torch's OpenMP threads: a second pool would compete for cores.
"""

import ctypes
import functools
import platform
import re
import shlex
import sys
from pathlib import Path

from megascale.errors import UsageError
from megascale.kernels.native import levels

OPENMP = re.compile(r"/\S*/lib(?:gomp|omp|iomp5)[^/]*\.so\S*")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library of the highest level that this CPU has, among those that were built.

    Raises UsageError: none was built, or of other sources; says how to build it.
    """
    built = [path for path in map(levels.path, levels.supported()) if path.exists()]
    if not built:
        raise UsageError(_how_to_build())
    return load(built[0])


def load(path: Path) -> ctypes.CDLL:
    """Return a library that :mod:`megascale.kernels.native.levels` has built.

    Raises UsageError: it cannot be loaded.
    """
    try:
        openmp = OPENMP.search(Path("/proc/self/maps").read_text())
        if openmp is not None:  # torch has loaded it for itself alone
            ctypes.CDLL(openmp[0], mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise UsageError(f"{path} does not fit this system, remove it and install megascale again: {error}") from error
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    arguments = {
        "measure": [pointer, pointer, count, pointer, pointer, ctypes.c_int],
        "update": [pointer, pointer, pointer, count, pointer, pointer, pointer, pointer, ctypes.c_int],
        "update_compact": [pointer] * 7 + [ctypes.c_int],
        "total": [*[pointer] * 5, count, pointer, ctypes.c_double, pointer],
        "decide": [pointer, pointer, ctypes.c_double, ctypes.c_double, pointer, pointer, pointer],
        "rescale": [pointer] * 5,
    }
    for name, types in arguments.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded


def _how_to_build() -> str:
    if not levels.levels_here():
        return f"the native backend has no library for {platform.system()} on {platform.machine()}"
    clone = levels.FOLDER.parents[3]
    if not (clone / "setup.py").exists():
        return "this installation has no library of the native backend: install gcc and build it, or take a Linux wheel"
    state = "is older than its sources" if any(levels.FOLDER.glob("*.so")) else "was not built"
    command = shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", "-e", str(clone)])
    return f"the native backend's library {state}; it takes a C compiler, such as gcc, and {command}"
