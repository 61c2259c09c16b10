"""Moments on a stream, and the seconds between them. Nobody waits for a measurement."""

from collections.abc import Callable

import torch

from megascale.utils.streams import current_stream, has_streams

Moment = torch.Event | float
"""A moment on a stream, or of the clock in seconds."""


def moment(device: torch.device, clock: Callable[[], float]) -> Moment:
    """Return the moment at which the current stream of ``device`` gets here; on a CPU, that of the clock."""
    if not has_streams(device):
        return clock()
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def between(begin: Moment, end: Moment) -> float:
    """Return the seconds between two moments. Waits for the stream."""
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
