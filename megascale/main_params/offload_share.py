"""Which part of an optimizer's main params lives in host memory: what forward needs first stays on the device."""

from collections.abc import Sequence


def goes(numels: Sequence[int], fraction: float) -> list[bool]:
    """Return which runs of elements go to host memory: at least ``fraction`` of all, the last ones in forward.

    Args:
        numels: elements of parameters that leave or stay together, in the order of forward, the same on all ranks.
        fraction: above 0, up to 1.
    """
    left = (1 - fraction) * sum(numels)
    found = []
    for numel in numels:
        left -= numel
        found.append(left < 0 or fraction == 1.0)
    return found
