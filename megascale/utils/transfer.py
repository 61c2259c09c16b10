"""What passes between the host and devices; the host waits for no value but those that it is to read."""

import torch
from torch import Tensor


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``: itself if it is there. The host waits only where ``device`` is the host.

    There the values could otherwise be read before they have arrived. Host memory is copied through pinned memory,
    which torch keeps until the copy is done: a copy from pageable memory would wait for all queued work of the device.
    """
    if tensor.device == device:
        return tensor
    if device.type in ("cpu", "meta"):
        return tensor.to(device)
    source = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
    return source.to(device, non_blocking=True)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` is being captured into a graph."""
    if device.type in ("cpu", "meta"):
        return False
    with torch.accelerator.device_index(device.index):  # torch tells it of the current device
        return bool(torch.get_device_module(device).is_current_stream_capturing())


_held: list[object] = []


def hold(read: object) -> None:
    """Keep what the graph that is being captured reads: as :func:`held_for_graph` returns it, or for good."""
    _held.append(read)


def held_for_graph() -> list[object]:
    """Return what is held for the graph that was captured last. Its replays read it: who has the graph has it, too."""
    found = list(_held)
    _held.clear()
    return found
