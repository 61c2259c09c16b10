"""Orders work on an accelerator's streams. Work of one stream runs in order; different streams must wait explicitly.

A CPU has no streams: these functions then do nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def has_streams(device: torch.device) -> bool:
    """Return whether ``device`` has streams: not a CPU, nor a device that is missing in this process."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


class WriteOrder:
    """Orders the streams that write parts of one tensor, and the stream that then reads all of it.

    A use starts with the first write and ends with :meth:`join`. The caller orders one use after another, by streams
    that wait for each other between steps.

    Attributes:
        is_needed: whether the tensor's device has streams. If not, no call is needed.
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
        stream = torch.accelerator.current_stream(self._device)
        before = self._writers.get(part)
        if before is not None and before != stream:
            stream.wait_stream(before)
        self._writers[part] = stream
        if stream not in self._kept_for:
            self._tensor.record_stream(stream)
            self._kept_for.add(stream)

    def join(self) -> None:
        """Let the current stream wait for all writers, and forget them."""
        if self._writers:
            stream = torch.accelerator.current_stream(self._device)
            for writer in set(self._writers.values()):
                if writer != stream:
                    stream.wait_stream(writer)
            self._writers.clear()


class Arrival:
    """A result that arrives on ``device`` later: every stream that uses it waits for it, once.

    Args:
        wait: makes the current stream wait; on a CPU, the host. Called once.
        device: where it arrives.
    """

    def __init__(self, wait: Callable[[], None], device: torch.device) -> None:
        self._wait = wait
        self._device = device
        self._has_streams = has_streams(device)
        self._event: torch.Event | None = None
        self._waited: set[torch.Stream] = set()

    def wait(self) -> bool:
        """Let the current stream wait. Returns True if no other stream has to wait: on a CPU."""
        if not self._has_streams:
            self._wait()
            return True
        stream = torch.accelerator.current_stream(self._device)
        if self._event is None:
            self._wait()
            self._event = stream.record_event()
        elif stream not in self._waited:
            stream.wait_event(self._event)
        self._waited.add(stream)
        return False
