"""Builds device.cpp, loads it into this process, and collects what it reports."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock

from tests.fake_device.record import WAITS, Call, Record, lines_of
from tests.needs import compiler, without_cxx

SOURCE = Path(__file__).with_name("device.cpp")
HEADERS = [SOURCE.with_name(name) for name in ("host_call.h", "late_streams.h", "memory.h", "report.h")]
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-w")
LIBRARIES = ("torch_cpu", "c10")
INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cpu"

_REPORT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int64)


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
    """Return device.cpp, built on this machine once, loaded: from now on torch has CUDA, of :class:`FakeDevice`."""
    loaded = ctypes.PyDLL(str(_built()))
    loaded.report_device_calls.argtypes, loaded.report_device_calls.restype = [_REPORT], None
    loaded.resize_device_storage.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.resize_device_storage.restype = None
    loaded.bytes_of_device.argtypes, loaded.bytes_of_device.restype = [ctypes.c_void_p], ctypes.c_void_p
    loaded.order_device_streams.argtypes = [ctypes.c_int, ctypes.c_uint32]
    loaded.order_device_streams.restype = ctypes.c_uint64
    loaded.most_device_bytes.restype = ctypes.c_uint64
    return loaded


def _built() -> Path:
    """Return the library, which processes and checkouts of this machine share. Of several processes one compiles."""
    command = [
        *(*compiler("CXX"), *FLAGS, "-shared"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(_torch_folder() / "include"), f"-L{_torch_folder() / 'lib'}"),
    ]
    linked = [f"-l{name}" for name in LIBRARIES]
    made_of = [*command, *linked, torch.__version__, *(source.read_text() for source in (SOURCE, *HEADERS))]
    folder = Path(tempfile.gettempdir(), f"megascale-tests-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"device-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:24]}.so"
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            unfinished = library.with_suffix(".part")
            subprocess.run([*command, str(SOURCE), "-o", str(unfinished), *linked], check=True, timeout=600)
            unfinished.replace(library)
    return library


ORDERS = ("at once", "late", "side first", "random")
"""How streams run: see late_streams.h, whose names these are."""


class WrittenAfterFree(AssertionError):
    """A stream has written memory that may have been given to others: nobody kept it for that stream."""


class FakeDevice:
    """The devices of a process. One object, made by :mod:`tests.fake_device.process`.

    Attributes:
        capture: the stream that a graph is captured on; None: none is.
        order: in which streams run now, one of ``ORDERS``.
    """

    def __init__(self) -> None:
        self.capture: tuple[int, int] | None = None
        self.order = "at once"
        self._record: Record | None = None
        self._without: str | None = None
        self._callback = _REPORT(self._reported)

    @contextmanager
    def watch(self) -> Iterator[Record]:
        """Collect all calls to the device meanwhile. Outside, calls cost no Python."""
        outer, self._record = self._record, Record()
        self._listen()
        try:
            yield self._record
        finally:
            self._record = outer
            self._listen()

    @contextmanager
    def running(self, order: str, seed: int = 0) -> Iterator[None]:
        """Let streams run in one of ``ORDERS`` meanwhile; "random" in another one for each seed.

        Raises WrittenAfterFree.
        """
        self._follow(order, seed)
        try:
            yield
        finally:
            written = self._follow("at once")
        if written:
            raise WrittenAfterFree(f"{written} tensors of the device were written after they were freed")

    @contextmanager
    def without(self, site: str) -> Iterator[None]:
        """Let one line of megascale wait for nothing meanwhile. ``site``: see :meth:`Call.line`."""
        self._without = site
        self._listen()
        try:
            yield
        finally:
            self._without = None
            self._listen()

    def _follow(self, order: str, seed: int = 0) -> int:
        self.order = order
        return int(library().order_device_streams(ORDERS.index(order), seed))

    def _listen(self) -> None:
        """Let calls be told where somebody wants to know."""
        is_heard = self._record is not None or self._without is not None
        library().report_device_calls(self._callback if is_heard else _REPORT())

    def take_most_bytes(self) -> int:
        """Return the most bytes of memory that the devices have held at once since the last call."""
        return int(library().most_device_bytes())

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

    def _reported(self, kind: bytes, what: bytes, device: int, stream: int) -> int:
        """Take note of a call. Returns whether it is to do nothing."""
        self.report(kind.decode(), what.decode(), (device, stream))
        return int(self._without is not None and kind.decode() in WAITS and lines_of("megascale", 1) == self._without)


def current_stream(device: int | None = None) -> tuple[int, int]:
    """Return the current stream of a device, else of the current one."""
    index = torch.accelerator.current_device_index() if device is None else device
    return index, torch.accelerator.current_stream(index).stream_id
