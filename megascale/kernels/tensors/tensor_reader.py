"""Reads what the host must know of many tensors in one walk over them, by tensor_reader.cpp where that can be built.

It is worth its compilation, some 20 s once on a machine, where there are thousands of tensors; some hundreds are read
by it where that has been done. Fewer are read from Python, attribute by attribute, and so are all where it cannot be
built. What is read is the same.
"""

import ctypes
import functools
import logging
import os
import sysconfig
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_, methodcaller
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels.compiler import Command, CompilerError, find_compiler
from megascale.kernels.library_build import Recipe, load, load_kept, share_openmp

SOURCE = Path(__file__).with_name("tensor_reader.cpp")
FLAGS = ("-std=c++20", "-O2", "-fPIC")
LIBRARIES = ("torch_python", "torch_cpu", "c10")

MANY = 4096
"""So many tensors are worth the compilation."""
SOME = 64
"""So many are read by the library where an earlier process has compiled it."""

ENVIRONMENT_VARIABLE = "MEGASCALE_TENSOR_READER"
"""``native``: build it for any number of tensors. ``python``: never."""

logger = logging.getLogger(__name__)


class Memory(NamedTuple):
    """Where tensors lie, and what lies there: int64 arrays, one element to a tensor.

    Tensors of one kind share dtype, device and contiguity, those of one layout shape and strides; the numbers
    themselves mean nothing else, but that a negative kind tells of a tensor that could not be read. Those that could
    are plain: no negative, conjugate or zero bit is set, and their storage holds all their elements.
    """

    pointers: NDArray[np.int64]
    numels: NDArray[np.int64]
    kinds: NDArray[np.int64]
    layouts: NDArray[np.int64]

    def at(self, places: slice | NDArray[np.int64]) -> "Memory | None":
        """Return that of the tensors at some places; None where one of them could not be read."""
        part = Memory(*(column[places] for column in self))
        return None if (part.kinds < 0).any() else part


# Called for every tensor at every step, in loops that run in C.
_LOOK: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.numel,
    Tensor.stride,
    attrgetter("dtype"),
    Tensor.is_neg,
)


Findings: TypeAlias = WeakKeyDictionary[object, dict[str, Any]]


class Facts(NamedTuple):
    """What is known of tensors: their memory, and int64 arrays, one element to a tensor.

    Attributes:
        grads: the memory of their gradients, where that was asked for.
        findings: what has been worked out of all this but the versions, by whoever did: the same dicts as long as
            nothing else changes, empty ones then. None: there is no place for it.
    """

    memory: Memory
    versions: NDArray[np.int64]
    requires_grad: NDArray[np.int64]
    grads: Memory | None
    findings: Findings | None = None


class Room:
    """Memory to read facts into. It serves again once no array of it is held: to get fresh memory costs more than to
    write into it. What was found out about the facts lies beside them.
    """

    def __init__(self) -> None:
        self._used: list[_Used] = []

    def take(self, rows: int, columns: int) -> tuple[NDArray[np.int64], Findings]:
        """Return an array of shape [rows, columns], and what was found out about what is in it.

        It holds what was last read there, or zeros about which nothing is known.
        """
        count = rows * columns
        free = [used for used in self._used if used.array() is None and used.shape == (rows, columns)]
        memory, findings = (free[0].memory, free[0].findings) if free else (bytearray(8 * count), WeakKeyDictionary())
        # The base of all that is cut from it: alive as long as any of that.
        array = np.ndarray(count, dtype=np.int64, buffer=memory)
        self._used = [used for used in self._used if used.array() is not None]
        self._used.append(_Used(memory, weakref.ref(array), (rows, columns), findings))
        return array.reshape(rows, columns), findings


class _Used(NamedTuple):
    """Memory of a room; ``array``: the one that was last made of it."""

    memory: bytearray
    array: "weakref.ref[NDArray[np.int64]]"
    shape: tuple[int, int]
    findings: Findings


def read(
    tensors: list[Tensor], *, among: int | None = None, grads: bool = False, room: Room | None = None
) -> Facts | None:
    """Return the facts of tensors; None where they have to be read from Python.

    Args:
        among: how many tensors there are, of which these are some; None: these.
        grads: read the memory of their gradients, too.
        room: what to read into; None: memory of their own.
    """
    native = _native(len(tensors) if among is None else among)
    if native is None:
        return None
    rows, findings = (Room() if room is None else room).take(10 if grads else 6, len(tensors))
    changed = ctypes.c_int64()
    memory, status, of_grads = rows[:4], rows[4:6], rows[6:]
    unread = native.read_tensors(
        tensors,
        memory.ctypes.data,
        status.ctypes.data,
        of_grads.ctypes.data if grads else None,
        ctypes.byref(changed),
        torch.get_num_threads(),
    )
    if unread or changed.value:
        findings.clear()
    if unread:
        return None
    return Facts(Memory(*memory), status[0], status[1], Memory(*of_grads) if grads else None, findings)


def expect_memory(tensors: list[Tensor]) -> Callable[[], bool]:
    """Return what tells, whenever it is called, whether tensors lie where they lie now, and are what they are now.

    Of a contiguous tensor that is as long as it was, the shape need not be told. The tensors are kept alive.

    Raises RuntimeError (NotImplementedError is one) for tensors without memory of their own, such as sparse ones; so
    does what is returned, for those that have become such.
    """
    native = _native(len(tensors))
    if native is not None:
        expected = native.expect_tensors(tensors)
        if expected is not None:
            return lambda: bool(native.hold_tensors(expected, torch.get_num_threads()))
    memory = _looked_up(tensors)
    return lambda: _looked_up(tensors) == memory


def _looked_up(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """Return columns that are equal where the memory of tensors is.

    An address tells the device, too: no two devices have one in common.
    """
    sizes = list(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)))
    return (*(list(map(look, tensors)) for look in _LOOK), sizes)


def read_versions(tensors: list[Tensor]) -> NDArray[np.int64]:
    """Return the versions of tensors, shape [len(tensors)]."""
    native = _native(len(tensors))
    if native is not None:
        versions = np.empty(len(tensors), dtype=np.int64)
        if native.read_versions(tensors, versions.ctypes.data, torch.get_num_threads()) == 0:
            return versions
    return np.array([tensor._version for tensor in tensors], dtype=np.int64)


def increment_versions(tensors: list[Tensor]) -> NDArray[np.int64] | None:
    """Tell autograd that all of them have been written: a saved one is no longer what it was.

    Returns their versions then, shape [len(tensors)]; None where each would have to be asked.
    """
    native = _native(len(tensors))
    if native is not None:
        versions = np.empty(len(tensors), dtype=np.int64)
        if native.increment_versions(tensors, versions.ctypes.data, torch.get_num_threads()) == 0:
            return versions
    torch.autograd.graph.increment_version(tensors)
    return None


def same_objects(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    native = _native(len(one))
    if native is not None:
        return bool(native.same_objects(one, other))
    return len(one) == len(other) and all(map(is_, one, other))


def new_tags(count: int) -> NDArray[np.int64]:
    """Return, for ``count`` dicts, that none has been looked at yet.

    With the same lists, and with tags that an earlier call has filled in, :func:`same_values` and :func:`hold_objects`
    read no dict again that has not changed since.
    """
    return np.zeros(count, dtype=np.int64)


def same_values(entries: Mapping[Any, Any], values: list[Any], tag: NDArray[np.int64]) -> bool:
    """Whether the values of a mapping, in its order, are the very objects of a list. ``tag``: of the mapping."""
    native = _native(len(values))
    if native is not None and isinstance(entries, dict):
        return bool(native.same_values(entries, values, tag.ctypes.data))
    return len(entries) == len(values) and all(map(is_, entries.values(), values))


def hold_objects(
    entries: list[dict[str, Any]], names: list[str], columns: list[list[Any]], tags: NDArray[np.int64]
) -> bool:
    """Whether ``entries[i][names[k]] is columns[k][i]`` for all i and k. ``tags``: of the entries."""
    native = _native(len(entries))
    if native is not None:
        return bool(native.hold_objects(entries, names, columns, tags.ctypes.data, torch.get_num_threads()))
    return all(
        len(column) == len(entries) and all(map(is_, column, map(methodcaller("get", name), entries)))
        for name, column in zip(names, columns, strict=True)
    )


def _native(count: int) -> ctypes.PyDLL | None:
    """Return the library where it is worth having for ``count`` tensors, and can be had."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE)
    if wanted == "python" or (count < SOME and wanted != "native"):
        return None
    return _library() if count >= MANY or wanted == "native" else _kept_library()


@functools.cache
def _library() -> ctypes.PyDLL | None:
    start = time.perf_counter()
    loaded = _loaded(load)
    if loaded is not None:
        logger.info("tensor_reader.cpp is ready after %.1f s", time.perf_counter() - start)
    return loaded


@functools.cache
def _kept_library() -> ctypes.PyDLL | None:
    return _loaded(load_kept)


def _loaded(load_recipe: Callable[[Recipe, type[ctypes.PyDLL]], ctypes.PyDLL | None]) -> ctypes.PyDLL | None:
    try:
        compiler = find_compiler("CXX", ("c++", "g++", "clang++"))
        if compiler is None:
            logger.info("no C++ compiler: many tensors are read from Python, at 3 us each and step")
            return None
        loaded = load_recipe(_recipe(compiler, [*FLAGS, "-fopenmp"] if share_openmp() else FLAGS), ctypes.PyDLL)
    except CompilerError as error:
        logger.info("tensor_reader.cpp cannot be built, many tensors are read from Python: %s", error)
        return None
    return None if loaded is None else _declare(loaded)


def _recipe(compiler: Command, flags: Sequence[str]) -> Recipe:
    """Return how the library is built. Its layout of a tensor is that of torch's headers, and of the interpreter's."""
    torch_folder = Path(torch.__file__).parent
    headers = [str(torch_folder / "include"), sysconfig.get_path("include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return Recipe(
        compiler,
        SOURCE,
        compile_flags=(*flags, abi, *(flag for folder in headers for flag in ("-isystem", folder))),
        link_flags=(f"-L{torch_folder / 'lib'}", *(f"-l{name}" for name in LIBRARIES)),
        depends=(torch.__version__, sysconfig.get_python_version()),
    )


def _declare(loaded: ctypes.PyDLL) -> ctypes.PyDLL:
    objects, memory, threads = ctypes.py_object, ctypes.c_void_p, ctypes.c_int
    signatures = {
        "read_tensors": [objects, memory, memory, memory, memory, threads],
        "expect_tensors": [objects],
        "hold_tensors": [objects, threads],
        "read_versions": [objects, memory, threads],
        "increment_versions": [objects, memory, threads],
        "same_objects": [objects, objects],
        "same_values": [objects, objects, memory],
        "hold_objects": [objects, objects, objects, memory, threads],
    }
    for name, types in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, ctypes.c_int64
    loaded.expect_tensors.restype = objects
    return loaded
