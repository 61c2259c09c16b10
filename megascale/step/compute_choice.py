"""ComputeChoice: ``optimizer_offload_compute="auto"``. Both ways are measured in the first steps, and ranks take one.

Both have the same bits, so that steps of either kind may follow each other. Nobody waits for a measurement: the
caller's stream passes an event before and after each update, and these are read when ranks exchange what they found.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from megascale.kernels import Decision
from megascale.main_params.main_param import MainParam
from megascale.main_params.offload_meter import Moment, between, moment
from megascale.step.host_update import HostUpdate
from megascale.step.update import InnerUpdate, MarkWritten, OverflowFlags, PendingUpdate
from megascale.utils.collectives import all_gather_object

STEPS = 8
"""Steps that each way takes before ranks exchange what they have measured."""
WARM_UP, LEAST_STEPS = 2, 3
"""Steps of each way that are left out, as memory is allocated in them, and how many that landed there must be."""


class _Timed(NamedTuple):
    """One update: when it began and ended, and whether it was skipped, fp32 0-d."""

    begin: Moment
    end: Moment
    found_inf: Tensor


class ComputeChoice(InnerUpdate):
    """Updates by each way in turn, until ranks have chosen one.

    Args:
        ways: by name, in the order in which they are tried; a later one takes over main params and state where the one
            before has left them.
        device: of the model params.
        group: the ranks that step together.
        clock: returns seconds; for a CPU, which has no streams.

    Attributes:
        now: the way that updates.
    """

    def __init__(
        self,
        ways: Mapping[str, HostUpdate],
        device: torch.device,
        group: ProcessGroup | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ways = dict(ways)
        self._device, self._group, self._clock = device, group, clock
        self._begin_anew()
        self._changed_at = 0

    def _begin_anew(self) -> None:
        self.now, *self._later = self._ways
        self._timed: dict[str, list[_Timed]] = {name: [] for name in self._ways}

    @property
    def way(self) -> HostUpdate:
        """What updates now."""
        return self._ways[self.now]

    def advance(self, steps: int) -> HostUpdate | None:
        """Go on to the next way where this one has taken its steps, or after the last one choose.

        Returns the chosen one, None while there is none. All ranks call it together, between two steps. To choose, the
        host waits for the device. A way counts by its slowest rank. Where a rank has seen too few steps that landed,
        all ways are tried once more.

        ``steps``: taken so far, the same on all ranks.
        """
        if steps < self._changed_at + STEPS:
            return None
        self._changed_at = steps
        if self._later:
            self.now, *self._later = self._later
            return None
        found = {name: _median(timed) for name, timed in self._timed.items()}
        every = all_gather_object(found, self._group)
        worst = {name: [one[name] for one in every] for name in self._ways}
        if any(seconds is None for row in worst.values() for seconds in row):
            self._begin_anew()
            return None
        self.now = min(worst, key=lambda name: max(seconds for seconds in worst[name] if seconds is not None))
        return self.way

    @override
    def apply(
        self, updates: Sequence[PendingUpdate], decision: Decision, mark_written: MarkWritten
    ) -> list[OverflowFlags]:
        """See :class:`InnerUpdate`, and measure."""
        begin = moment(self._device, self._clock)
        flags = self.way.apply(updates, decision, mark_written)
        end = moment(self._device, self._clock)
        self._timed[self.now].append(_Timed(begin, end, decision.found_inf.detach().clone()))
        return flags

    @override
    def raise_failure(self) -> None:
        self.way.raise_failure()

    @override
    def forget_failure(self) -> None:
        self.way.forget_failure()

    @override
    def prepare(self, updates: Sequence[PendingUpdate]) -> list[PendingUpdate]:
        return self.way.prepare(updates)

    @override
    def create_states(self, options: dict[str, Any], params: Sequence[MainParam]) -> None:
        self.way.create_states(options, params)

    @override
    def required_state(self, options: dict[str, Any]) -> list[str]:
        return self.way.required_state(options)

    @override
    def check_options(self, options: dict[str, Any]) -> None:
        self.way.check_options(options)

    @override
    def readable_state(self, name: str, state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        return self.way.readable_state(name, state, dtype)

    @override
    def update_signature(self) -> str:
        return self.way.update_signature()

    @override
    def why_not_capturable(self) -> str | None:
        return self.way.why_not_capturable()

    @override
    def release_scratch(self) -> None:
        for way in self._ways.values():
            way.release_scratch()


def _median(timed: Sequence[_Timed]) -> float | None:
    """Return the seconds of the steps that landed; None where there are too few."""
    landed = [between(one.begin, one.end) for one in timed[WARM_UP:] if one.found_inf.item() == 0]
    return median(landed) if len(landed) >= LEAST_STEPS else None
