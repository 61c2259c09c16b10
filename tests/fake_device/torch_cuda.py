"""What ``torch.cuda`` lacks, or asks a driver for: streams, graphs, and what a capture refuses."""

from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from tests.fake_device.device import FakeDevice, current_stream, library


def install(device: FakeDevice) -> None:
    """Give ``torch.cuda`` what megascale, and torch's own modules, ask of it."""

    class Graph:
        """A graph that holds nothing: what is captured has already run."""

        def replay(self) -> None:
            device.report("replay", "graph", current_stream())

    class Capture:
        """``torch.cuda.graph``. As torch's, it takes the stream that the first capture took, where none is given."""

        usual: torch.Stream | None = None

        def __init__(
            self,
            cuda_graph: Graph,
            pool: Any = None,
            stream: torch.Stream | None = None,
            capture_error_mode: str = "global",
        ) -> None:
            if stream is None:
                stream = Capture.usual = Capture.usual or Stream()
            self._stream = stream
            self._mode = capture_error_mode

        def __enter__(self) -> None:
            torch.accelerator.synchronize()
            self._stream.__enter__()
            device.capture = self._stream.device_index, self._stream.stream_id
            device.report("capture", self._mode, device.capture)

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None:
            device.capture = None
            self._stream.__exit__(kind, error, traceback)

    replacements = REPLACED | {
        "is_current_stream_capturing": lambda: device.capture == current_stream(),
        "CUDAGraph": Graph,
        "graph": Capture,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign, assignment]


_resize_host_storage = torch.UntypedStorage.resize_


def _resize_storage(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize_host_storage(storage, nbytes)
    library().resize_device_storage(storage._cdata, nbytes)
    return storage


class Stream:
    """A new stream of a device, else of the current one. It is a class, as annotations of libraries say."""

    def __new__(cls, device: Any = None, priority: int = 0) -> torch.Stream:  # type: ignore[misc]
        """Return a torch.Stream."""
        chosen = torch.device("cuda" if device is None else device)
        if chosen.index is None:
            chosen = torch.device("cuda", torch.accelerator.current_device_index())
        return torch.Stream(chosen)


class _Event(torch.Event):
    """A class, as torch asks of objects whether they are one."""

    def __new__(cls, **options: Any) -> "_Event":
        return super().__new__(cls, "cuda")


NUM_DEVICES = 8  # as in report.h

REPLACED: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: NUM_DEVICES,
    "current_device": torch.accelerator.current_device_index,
    "set_device": torch.accelerator.set_device_index,
    "get_device_capability": lambda *_: (9, 0),
    "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, total_memory=0),
    "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
    "set_rng_state": lambda *_: None,
    "synchronize": torch.accelerator.synchronize,
    "current_stream": torch.accelerator.current_stream,
    "default_stream": lambda *_: torch.Stream("cuda"),
    "Stream": Stream,
    "Event": _Event,
    "stream": lambda stream: stream,  # a torch.Stream is a context
}
"""What ``torch.cuda`` gets on any fake device."""
