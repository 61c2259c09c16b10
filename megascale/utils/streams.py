"""The streams of an accelerator: work of one stream keeps its order, work of two has none but what they wait for.

A CPU has no streams: nothing here does anything then.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def has_streams(device: torch.device) -> bool:
    """Return whether work on ``device`` is put on streams: not on a CPU, nor on a device that this process has not."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that work on ``device`` is put on."""
    return torch.accelerator.current_stream(device)


def keep(tensor: Tensor, stream: torch.Stream) -> None:
    """Let the allocator reuse the memory of ``tensor`` only behind what ``stream`` was given when it is freed."""
    tensor.record_stream(stream)


def keep_for_current_stream(tensor: Tensor) -> None:
    """See :func:`keep`. For scratch that another stream may have allocated."""
    if has_streams(tensor.device):
        keep(tensor, current_stream(tensor.device))


class WriteOrder:
    """Orders the streams that write parts of one tensor, and the one that then uses all of it.

    A use begins with the first write and ends with :meth:`join`. What orders one use behind the one before is not known
    here: the caller's streams wait for each other between steps.

    Attributes:
        is_needed: whether the tensor's device has streams. Nothing need be called where it has none.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._device = tensor.device
        self.is_needed = has_streams(tensor.device)
        self._writers: dict[str, torch.Stream] = {}
        self._kept_for: set[torch.Stream] = set()

    def write(self, part: str = "") -> None:
        """Let the current stream wait for the stream that wrote ``part`` last; it writes next."""
        if not self.is_needed:
            return
        stream = current_stream(self._device)
        before = self._writers.get(part)
        if before is not None and before != stream:
            stream.wait_stream(before)
        self._writers[part] = stream
        if stream not in self._kept_for:
            keep(self._tensor, stream)
            self._kept_for.add(stream)

    def join(self) -> None:
        """Let the current stream wait for all writers, and forget them."""
        if self._writers:
            stream = current_stream(self._device)
            for writer in set(self._writers.values()):
                if writer != stream:
                    stream.wait_stream(writer)
            self._writers.clear()


class Arrival:
    """What arrives on ``device`` behind other work: every stream that uses it waits for it, once.

    Args:
        wait: lets the current stream wait; on a CPU, the host. Called once.
        device: where it arrives.
    """

    def __init__(self, wait: Callable[[], None], device: torch.device) -> None:
        self._wait = wait
        self._device = device
        self._has_streams = has_streams(device)
        self._event: torch.Event | None = None
        self._waited: set[torch.Stream] = set()

    def wait(self) -> bool:
        """Let the current stream wait. Returns whether nobody has to wait any more: on a CPU."""
        if not self._has_streams:
            self._wait()
            return True
        stream = current_stream(self._device)
        if self._event is None:
            self._wait()
            self._event = stream.record_event()
        elif stream not in self._waited:
            stream.wait_event(self._event)
        self._waited.add(stream)
        return False
