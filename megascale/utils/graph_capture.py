"""Tells whether a device is capturing a graph: nothing runs then, and the host cannot read results."""

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` is being captured into a graph."""
    if device.type in ("cpu", "meta"):
        return False
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    if capturing is None:
        return False
    with torch.accelerator.device_index(device.index):  # torch tells it of the current device
        return bool(capturing())
