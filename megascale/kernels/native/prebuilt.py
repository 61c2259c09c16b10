"""The libraries that a wheel brings for machines without a compiler."""

import ctypes
import logging

from megascale.errors import UsageError
from megascale.kernels.library_build import open_in_memory, read_file, share_openmp
from megascale.kernels.native import levels

logger = logging.getLogger(__name__)


def load(name: str) -> ctypes.CDLL:
    """Return the library of a level.

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
    """Return the library of the highest level that this CPU has, and that can be loaded; what cannot is warned of.

    Raises UsageError: there is none.
    """
    for name in levels.supported():
        if any(levels.FOLDER.glob(f"{levels.stem(name)}-*.so")):
            try:
                return load(name)
            except UsageError as error:
                logger.warning("%s", error)
    raise UsageError("no library for this machine came with this installation: a wheel for Linux brings some")
