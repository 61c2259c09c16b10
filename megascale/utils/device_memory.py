"""How much memory an accelerator has left."""

import torch

from megascale.utils.streams import has_streams

MARGIN = 20
"""One part in so many of all its memory stays free: memory comes in blocks, and other processes take some."""


def room_on(device: torch.device) -> int | None:
    """Return the bytes that are left beside the most that this process has held at once; None where that is unknown.

    0 or less where nothing is left.
    """
    if not has_streams(device):
        return None
    memory = torch.accelerator.memory
    try:
        free, total = memory.get_memory_info(device)
        reserved, most = memory.memory_reserved(device), memory.max_memory_allocated(device)
    except (RuntimeError, NotImplementedError, AttributeError):  # not every device counts
        return None
    return int(free + reserved - most - total // MARGIN)
