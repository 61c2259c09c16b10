"""The native library: builds native.c and loads it, or what a wheel brings for machines without a compiler."""

import ctypes
import functools
import logging
import os
from collections.abc import Iterator

from megascale.errors import UsageError
from megascale.kernels.compiler import CompilerError, CompilerTimeout, find_compiler, machine_flag
from megascale.kernels.library_build import Recipe, load, open_in_memory, read_file, share_openmp
from megascale.kernels.native import levels
from megascale.utils import validate

SOURCE, HEADERS, FLAGS = levels.SOURCE, levels.HEADERS, levels.FLAGS

COMPILE_SECONDS = 12
"""About how long native.c takes, for one set of instructions: this machine's."""
ENVIRONMENT_VARIABLE = "MEGASCALE_NATIVE_LIBRARY"
"""``auto``: compiled here, else the wheel's. ``compiled``: never the wheel's. A name of levels.NAMES: the wheel's."""

logger = logging.getLogger(__name__)


def library() -> ctypes.CDLL:
    """Return the library, built if necessary. A process tries to build it only once.

    Raises:
        ArgumentError: MEGASCALE_NATIVE_LIBRARY has an unknown value.
        UsageError: there is no library; says how it could be had.
    """
    choices = ("auto", "compiled", *levels.NAMES)
    wanted = validate.one_of(ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, "auto"), choices)
    outcome = _outcome(wanted)
    if isinstance(outcome, str):
        raise UsageError(outcome)
    return outcome


@functools.cache
def _outcome(wanted: str) -> ctypes.CDLL | str:
    """Return the library, or why there is none."""
    try:
        return _declare(load_prebuilt(wanted) if wanted in levels.NAMES else _compiled())
    except UsageError as error:
        return _from_wheel(error) if wanted == "auto" else str(error)


def _compiled() -> ctypes.CDLL:
    """Return the library, compiled for this very CPU.

    Raises:
        CompilerError: the compiler fails; with its output.
        UsageError: there is none.
    """
    compiler = find_compiler("CC", ("cc", "gcc", "clang"))
    if compiler is None:
        raise UsageError("the native backend needs a C compiler; install gcc or clang, or set CC")
    errors = []
    for flags in _flags():
        try:
            # Linked without -fopenmp, which would name a runtime of the compiler's own.
            return load(Recipe(compiler, SOURCE, flags, ("-lm",), (HEADERS,), COMPILE_SECONDS), ctypes.CDLL)
        except CompilerError as error:
            errors.append(str(error))
            if isinstance(error, CompilerTimeout):
                break
    raise CompilerError("native.c cannot be built; set CC to a working C compiler:\n" + "\n".join(errors))


def _from_wheel(error: UsageError) -> ctypes.CDLL | str:
    """Return the wheel's library in place of one that cannot be compiled, or why there is neither."""
    try:
        found = load_highest()
    except UsageError as other:
        return f"{error}\n{other}"
    fails = isinstance(error, CompilerError)
    logger.log(logging.WARNING if fails else logging.INFO, "%s\nUsing the library that the wheel brought", error)
    return _declare(found)


def load_prebuilt(name: str) -> ctypes.CDLL:
    """Return the library of a level, of the wheel.

    Raises UsageError: this CPU has not that level, or there is no such library of these sources, or it is damaged.
    """
    if name not in levels.supported():
        raise UsageError(f"this CPU cannot run native.c's library {name!r}; it can run {levels.supported()}")
    paths = sorted(levels.FOLDER.glob(f"{levels.stem(name)}-*.so"))
    if not paths:
        raise UsageError(f"no library {name!r} came with this installation; install a C compiler, or a wheel for Linux")
    try:
        share_openmp()
        content = read_file(paths[0])
        if paths[0].name != levels.file_name(name, content):
            raise OSError("its content is not what the wheel brought")
        loaded = open_in_memory(content, paths[0], ctypes.CDLL)
    except OSError as error:
        raise UsageError(f"{paths[0]} is damaged or does not fit this system, reinstall megascale: {error}") from error
    logger.info("native.c's library %s, of the wheel", name)
    return loaded


def load_highest() -> ctypes.CDLL:
    """Return the wheel's library of the highest level that this CPU has and that can be loaded.

    What cannot be loaded is warned of. Raises UsageError: there is none.
    """
    for name in levels.supported():
        if any(levels.FOLDER.glob(f"{levels.stem(name)}-*.so")):
            try:
                return load_prebuilt(name)
            except UsageError as error:
                logger.warning("%s", error)
    raise UsageError("no library for this machine came with this installation: a wheel for Linux brings some")


def _flags() -> Iterator[tuple[str, ...]]:
    """Yield sets of compiler flags to try, best first."""
    if share_openmp():
        yield (*FLAGS, machine_flag(), "-fopenmp")
    yield (*FLAGS, machine_flag())
    yield FLAGS


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    arguments = {
        "measure": [pointer, pointer, count, pointer, pointer, ctypes.c_int],
        "update": [pointer, pointer, pointer, count, pointer, pointer, pointer, pointer, ctypes.c_int],
        "update_compact": [pointer] * 7 + [ctypes.c_int],
        "hold": [pointer, pointer, ctypes.c_int, pointer, ctypes.c_int],
        "total": [*[pointer] * 5, count, pointer, ctypes.c_double, pointer],
        "decide": [pointer, pointer, ctypes.c_double, pointer, pointer],
        "rescale": [pointer] * 5,
    }
    for name, types in arguments.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded
