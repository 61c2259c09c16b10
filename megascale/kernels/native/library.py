"""Builds and loads native.c."""

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

from megascale.errors import UsageError
from megascale.kernels.compiler import CompilerError, CompilerTimeout, find_compiler, machine_flag
from megascale.kernels.library_build import Recipe, load, share_openmp

SOURCE = Path(__file__).with_name("native.c")
HEADERS = "".join(Path(__file__).with_name(name).read_text() for name in ("chunks.h", "vector.h"))
# No fast math and no contraction, so that main params have the reference's bits.
FLAGS = ("-std=c11", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


def library() -> ctypes.CDLL:
    """Return the library, built if necessary. A process tries to build it only once.

    Raises:
        UsageError: there is no C compiler, or it fails; with its output.
    """
    outcome = _outcome()
    if isinstance(outcome, str):
        raise UsageError(outcome)
    return outcome


@functools.cache
def _outcome() -> ctypes.CDLL | str:
    """Return the library, or the reason why there is none."""
    errors = []
    try:
        compiler = find_compiler("CC", ("cc", "gcc", "clang"))
        if compiler is None:
            return "the native backend needs a C compiler; install gcc or clang, or set CC"
        for flags in _flags():
            try:
                # Linked without -fopenmp, which would add the compiler's own runtime.
                return _declare(load(Recipe(compiler, SOURCE, flags, ("-lm",), (HEADERS,)), ctypes.CDLL))
            except CompilerTimeout:
                raise
            except CompilerError as error:
                errors.append(str(error))
    except CompilerError as error:
        errors.append(str(error))
    return "native.c cannot be built; set CC to a working C compiler:\n" + "\n".join(errors)


def _flags() -> Iterator[tuple[str, ...]]:
    """Yield sets of compiler flags to try, best first."""
    if share_openmp():
        yield (*FLAGS, machine_flag(), "-fopenmp")
    yield (*FLAGS, machine_flag())
    yield FLAGS


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    loaded.measure.argtypes = [pointer, pointer, count, pointer, pointer, ctypes.c_int]
    loaded.measure.restype = None
    loaded.update.argtypes = [pointer, pointer, pointer, count, pointer, pointer, pointer, pointer, ctypes.c_int]
    loaded.update.restype = None
    loaded.total.argtypes = [*[pointer] * 5, count, pointer, ctypes.c_double, pointer]
    loaded.total.restype = None
    loaded.decide.argtypes = [pointer, pointer, ctypes.c_double, pointer, pointer]
    loaded.decide.restype = None
    loaded.rescale.argtypes = [pointer, pointer, pointer, pointer, pointer]
    loaded.rescale.restype = None
    return loaded
