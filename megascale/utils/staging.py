"""Values of the host on their way to a device, without making the host wait."""

import torch
from torch import Tensor


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``: itself if it is there.

    From host memory it is copied through pinned memory, which torch keeps until the copy is done: a copy from other
    memory makes the host wait for all that the device has to do.
    """
    if tensor.device.type != "cpu" or device.type in ("cpu", "meta"):
        return tensor.to(device, non_blocking=True)
    return tensor.pin_memory().to(device, non_blocking=True)
