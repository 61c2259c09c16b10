"""Reads addresses, versions and types of many tensors in one walk, by tensor_reader.cpp where that can be built.

Its compilation, some 20 s once on a machine, pays for thousands of tensors; for hundreds it is used if it is built
already. Fewer tensors, or all where it cannot be built, are read from Python, attribute by attribute, with the same
results.
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
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megascale.kernels.compiler import Command, CompilerError, find_compiler
from megascale.kernels.library_build import Recipe, load, load_kept, share_openmp

SOURCE = Path(__file__).with_name("tensor_reader.cpp")
HEADER = "tensor_memory.h"
"""Lies beside the source."""
FLAGS = ("-std=c++20", "-O3", "-fPIC")
LIBRARIES = ("torch_python", "torch_cpu", "c10")

MANY = 4096
"""For this number of tensors the library is compiled."""
SOME = 64
"""For this number of tensors the library is used if it is compiled already."""

ENVIRONMENT_VARIABLE = "MEGASCALE_TENSOR_READER"
"""``native``: build the library for any number of tensors. ``python``: never use it."""

logger = logging.getLogger(__name__)


class Memory(NamedTuple):
    """Addresses and forms of tensors: int64 arrays, one element per tensor.

    Tensors of one kind share dtype, device and contiguity, those of one layout share shape and strides. Numbers have no
    other meaning, except that a negative kind marks a tensor that could not be read. All others are plain: no neg, conj
    or zero bit is set, and their storage holds all their elements.
    """

    pointers: NDArray[np.int64]
    numels: NDArray[np.int64]
    kinds: NDArray[np.int64]
    layouts: NDArray[np.int64]

    def at(self, places: slice | NDArray[np.int64]) -> "Memory | None":
        """Return the memory of the tensors at some indices; None if one of them could not be read."""
        part = Memory(*(column[places] for column in self))
        return None if (part.kinds < 0).any() else part


# Methods that map() calls in C, at every step, for every tensor.
_LOOK: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.numel,
    Tensor.stride,
    attrgetter("dtype"),
    Tensor.is_neg,
)


Findings: TypeAlias = WeakKeyDictionary[object, dict[str, Any]]


class Facts(NamedTuple):
    """What one walk reads: the tensors' memory, and int64 arrays with one element per tensor.

    Attributes:
        grads: the memory of their gradients, if requested.
        findings: caches, by owner, of what was derived from all this but versions and gradients' addresses: kept while
            nothing else changes, else emptied. None: nothing is cached.
    """

    memory: Memory
    versions: NDArray[np.int64]
    requires_grad: NDArray[np.int64]
    grads: Memory | None
    findings: Findings | None = None


class Room:
    """Reusable memory for facts, with the findings about them.

    A piece is reused when no array of it is alive: fresh memory costs more than writing into it.
    """

    def __init__(self) -> None:
        self._used: list[_Used] = []

    def take(self, rows: int, columns: int) -> tuple[NDArray[np.int64], Findings]:
        """Return an array of shape [rows, columns] and the findings about its content.

        The array holds what was last read into it, or zeros without findings.
        """
        count = rows * columns
        free = [used for used in self._used if used.array() is None and used.shape == (rows, columns)]
        memory, findings = (free[0].memory, free[0].findings) if free else (bytearray(8 * count), WeakKeyDictionary())
        # The base of all views of it, so it lives as long as any of them.
        array = np.ndarray(count, dtype=np.int64, buffer=memory)
        self._used = [used for used in self._used if used.array() is not None]
        self._used.append(_Used(memory, weakref.ref(array), (rows, columns), findings))
        return array.reshape(rows, columns), findings


class _Used(NamedTuple):
    """A piece of a room's memory; ``array``: a weak reference to the last array made of it."""

    memory: bytearray
    array: "weakref.ref[NDArray[np.int64]]"
    shape: tuple[int, int]
    findings: Findings


def read(
    tensors: list[Tensor], *, among: int | None = None, grads: bool = False, room: Room | None = None
) -> Facts | None:
    """Return the facts of tensors, read in one walk; None if they must be read from Python.

    Args:
        among: choose the way of reading for this number of tensors; None: for ``len(tensors)``.
        grads: read the memory of their gradients, too.
        room: to read into; None: new memory.
    """
    native = _native(len(tensors) if among is None else among)
    if native is None:
        return None
    rows, findings = (Room() if room is None else room).take(10 if grads else 6, len(tensors))
    changed = native.read_facts(tensors, rows, grads)
    if changed is not False:
        findings.clear()
    if changed is None:
        return None
    pointers, numels, kinds, layouts, versions, requires_grad, *of_grads = rows
    memory = Memory(pointers, numels, kinds, layouts)
    return Facts(memory, versions, requires_grad, Memory(*of_grads) if grads else None, findings)


def expect_memory(tensors: list[Tensor]) -> Callable[[], bool]:
    """Return a function that tells whether tensors still have the addresses and forms that they have now.

    It may miss a new shape of a contiguous tensor of the same length. It keeps the tensors alive. Both functions raise
    RuntimeError (or its subclass NotImplementedError) for tensors without memory of their own, such as sparse ones.
    """
    native = _native(len(tensors))
    if native is not None:
        expected = native.expect_memory(tensors)
        if expected is not None:
            return functools.partial(native.holds_memory, expected)
    memory = _looked_up(tensors)
    return lambda: _looked_up(tensors) == memory


def _looked_up(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """Return columns that are equal if the memory of tensors is equal.

    An address also identifies the device: no two devices share addresses.
    """
    sizes = list(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)))
    return (*(list(map(look, tensors)) for look in _LOOK), sizes)


def read_versions(tensors: list[Tensor]) -> NDArray[np.int64]:
    """Return the versions of tensors, shape [len(tensors)]."""
    native = _native(len(tensors))
    if native is not None:
        versions = np.empty(len(tensors), dtype=np.int64)
        if native.read_versions(tensors, versions):
            return versions
    return np.array([tensor._version for tensor in tensors], dtype=np.int64)


def increment_versions(tensors: list[Tensor]) -> NDArray[np.int64] | None:
    """Tell autograd that all of ``tensors`` have been written.

    Returns their new versions, shape [len(tensors)]; None if they would have to be read one by one.
    """
    native = _native(len(tensors))
    if native is not None:
        versions = np.empty(len(tensors), dtype=np.int64)
        if native.increment_versions(tensors, versions):
            return versions
    torch.autograd.graph.increment_version(tensors)
    return None


def same_objects(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects, by identity."""
    native = _native(len(one))
    if native is not None:
        return bool(native.same_objects(one, other))
    return len(one) == len(other) and all(map(is_, one, other))


def new_tags(count: int) -> NDArray[np.int64]:
    """Return fresh version tags for ``count`` dicts.

    :func:`same_values` and :func:`hold_objects` fill them in, and later calls with the same lists skip dicts that have
    not changed.
    """
    return np.zeros(count, dtype=np.int64)


def same_values(entries: Mapping[Any, Any], values: list[Any], tag: NDArray[np.int64]) -> bool:
    """Whether the values of a mapping, in its order, are the same objects as a list's. ``tag``: of the mapping."""
    native = _native(len(values))
    if native is not None and isinstance(entries, dict):
        return bool(native.same_values(entries, values, tag))
    return len(entries) == len(values) and all(map(is_, entries.values(), values))


def hold_objects(
    entries: list[dict[str, Any]], names: list[str], columns: list[list[Any]], tags: NDArray[np.int64]
) -> bool:
    """Whether ``entries[i][names[k]] is columns[k][i]`` for all i and k. ``tags``: of the entries."""
    native = _native(len(entries))
    if native is not None:
        return bool(native.hold_objects(entries, names, columns, tags))
    return all(
        len(column) == len(entries) and all(map(is_, column, map(methodcaller("get", name), entries)))
        for name, column in zip(names, columns, strict=True)
    )


def _native(count: int) -> Any:
    """Return the library's functions if it pays for ``count`` tensors and can be built."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE)
    if wanted == "python" or (count < SOME and wanted != "native"):
        return None
    return _library() if count >= MANY or wanted == "native" else _kept_library()


@functools.cache
def _library() -> ModuleType | None:
    start = time.perf_counter()
    loaded = _loaded(load)
    if loaded is not None:
        logger.info("tensor_reader.cpp is ready after %.1f s", time.perf_counter() - start)
    return loaded


@functools.cache
def _kept_library() -> ModuleType | None:
    return _loaded(load_kept)


def _loaded(load_recipe: Callable[[Recipe, type[ctypes.PyDLL]], ctypes.PyDLL | None]) -> ModuleType | None:
    try:
        compiler = find_compiler("CXX", ("c++", "g++", "clang++"))
        if compiler is None:
            logger.info("no C++ compiler: many tensors are read from Python, at 6 to 10 us a parameter and step")
            return None
        loaded = load_recipe(_recipe(compiler, [*FLAGS, "-fopenmp"] if share_openmp() else FLAGS), ctypes.PyDLL)
    except CompilerError as error:
        logger.info("tensor_reader.cpp cannot be built, many tensors are read from Python: %s", error)
        return None
    return None if loaded is None else _functions(loaded)


def _functions(loaded: ctypes.PyDLL) -> ModuleType:
    """Return the library's functions, which tensor_reader.cpp describes."""
    loaded.functions.restype = ctypes.py_object
    functions: ModuleType = loaded.functions()
    return functions


def _recipe(compiler: Command, flags: Sequence[str]) -> Recipe:
    """Return the recipe of the library, which depends on torch's and Python's headers."""
    torch_folder = Path(torch.__file__).parent
    headers = [str(torch_folder / "include"), sysconfig.get_path("include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return Recipe(
        compiler,
        SOURCE,
        compile_flags=(*flags, abi, *(flag for folder in headers for flag in ("-isystem", folder))),
        link_flags=(f"-L{torch_folder / 'lib'}", *(f"-l{name}" for name in LIBRARIES)),
        depends=(SOURCE.with_name(HEADER).read_text(), torch.__version__, sysconfig.get_python_version()),
        seconds=20,
    )
