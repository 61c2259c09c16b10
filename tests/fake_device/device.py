"""Builds device.cpp, loads it into this process, and collects what it reports."""

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megascale.kernels.compiler import find_compiler
from megascale.kernels.library_build import Recipe, load
from tests.fake_device.record import Call, Record, lines_of
from tests.needs import COMPILERS, without_cxx

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-w")
LIBRARIES = ("torch_cpu", "c10")
INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cpu"

_REPORT = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int64)


def why_not() -> str | None:
    """Return why this machine cannot have the device; None where it can."""
    if torch.accelerator.is_available():
        return f"a device is there; needs a torch that does not see it: {INSTALL}"
    if torch.version.hip is not None or not (_torch_folder() / "include" / "ATen").is_dir():
        return f"needs a torch for CPUs or CUDA, with its C++ headers: {INSTALL}"
    if (reason := without_cxx()) is not None:
        return reason
    return None if importlib.util.find_spec("triton") else "needs triton"


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


@functools.cache
def library() -> ctypes.PyDLL:
    """Return device.cpp, built on this machine once, loaded: from now on torch has CUDA, of :class:`FakeDevice`.

    Raises CompilerError.
    """
    compiler = find_compiler("CXX", COMPILERS["CXX"])
    if compiler is None:
        raise LookupError("no C++ compiler")
    recipe = Recipe(
        compiler,
        SOURCE,
        compile_flags=(
            *FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-isystem",
            str(_torch_folder() / "include"),
        ),
        link_flags=(f"-L{_torch_folder() / 'lib'}", *(f"-l{name}" for name in LIBRARIES)),
        depends=(torch.__version__,),
    )
    loaded = load(recipe, ctypes.PyDLL)
    loaded.report_device_calls.argtypes, loaded.report_device_calls.restype = [_REPORT], None
    loaded.resize_device_storage.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.resize_device_storage.restype = None
    return loaded


class FakeDevice:
    """The devices of a process. One object, made by :mod:`tests.fake_device.process`.

    Attributes:
        capture: the stream that a graph is captured on; None: none is.
    """

    def __init__(self) -> None:
        self.capture: tuple[int, int] | None = None
        self._record: Record | None = None
        self._callback = _REPORT(self._reported)

    @contextmanager
    def watch(self) -> Iterator[Record]:
        """Collect all calls to the device meanwhile. Outside, calls cost no Python."""
        outer, self._record = self._record, Record()
        library().report_device_calls(self._callback)
        try:
            yield self._record
        finally:
            self._record = outer
            if outer is None:
                library().report_device_calls(_REPORT())

    def report(self, kind: str, what: str, stream: tuple[int, int], programs: int = 0) -> None:
        """Take note of one call, made by the code that is running."""
        if self._record is not None:
            site = lines_of("megascale")
            captured = self.capture is not None
            self._record.append(Call(kind, what, stream, site, programs, captured, threading.get_ident()))

    @property
    def is_watched(self) -> bool:
        """Whether calls are collected."""
        return self._record is not None

    def _reported(self, kind: bytes, what: bytes, device: int, stream: int) -> None:
        self.report(kind.decode(), what.decode(), (device, stream))


def current_stream(device: int | None = None) -> tuple[int, int]:
    """Return the current stream of a device, else of the current one."""
    index = torch.accelerator.current_device_index() if device is None else device
    return index, torch.accelerator.current_stream(index).stream_id
