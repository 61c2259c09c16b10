"""OffloadMeter: how long the host updates and sends weights in a step, and for how long forward stands still for them.

Nobody waits for a measurement: the thread that updates looks at a clock; around each wait for weights the caller's
stream passes two events, which are read steps later. On a CPU, which has no streams, the caller looks at the clock.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megascale.utils.streams import current_stream, has_streams

Moment = torch.Event | float
"""A moment on a stream, or of the clock in seconds."""


class OffloadSeconds(NamedTuple):
    """What one step took, in seconds.

    Attributes:
        busy: from the arrival of the first gradients in host memory until the last weights were sent.
        stalled: for how much of that, or of their gathers, modules stood still.
    """

    busy: float
    stalled: float


class StepRecord:
    """The moments of one step.

    Attributes:
        begun, ended: of the update in host memory, by the clock; None before.
        landed: False where the step was skipped, whose update takes no time.
        waits: begin and end of each wait.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begun: float | None = None
        self.ended: float | None = None
        self.landed = False
        self.waits: list[tuple[Moment, Moment]] = []

    def begin(self, *, landed: bool) -> None:
        """Note that gradients of a unit have arrived. Called by the thread."""
        self.landed = landed
        if self.begun is None:
            self.begun = self._clock()

    def end(self) -> None:
        """Note that all weights were sent. Called by the thread."""
        self.ended = self._clock()


class OffloadMeter:
    """Records steps while :attr:`is_on`.

    Args:
        device: of the model params.
        clock: returns seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_on = True
        self._device, self._clock = device, clock
        self._records: list[StepRecord] = []

    def begin_step(self) -> StepRecord | None:
        """Return the record of a step whose update is about to begin; None while nothing is measured."""
        if not self.is_on:
            return None
        self._records.append(StepRecord(self._clock))
        return self._records[-1]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait of the current stream for weights of the newest step."""
        if not (self.is_on and self._records):
            yield
            return
        begin = moment(self._device, self._clock)
        yield
        self._records[-1].waits.append((begin, moment(self._device, self._clock)))

    def seconds(self) -> list[OffloadSeconds]:
        """Return what the steps that landed took. All of their updates and waits must be over."""
        return [
            OffloadSeconds(one.ended - one.begun, sum(between(*wait) for wait in one.waits))
            for one in self._records
            if one.landed and one.begun is not None and one.ended is not None
        ]

    def stop(self) -> None:
        """Measure no more, and forget what was measured."""
        self.is_on = False
        self._records.clear()


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
