"""Copies host values to a device without a host sync."""

import torch
from torch import Tensor


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``: itself if it is there.

    Host memory is copied through pinned memory, which torch keeps until the copy is done: a copy from pageable memory
    would wait for all queued work of the device.
    """
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device, non_blocking=True)
    return tensor.pin_memory().to(device, non_blocking=True)
