"""OffloadTuner: ``optimizer_offload_fraction="auto"``. Sends as much to host memory as can be hidden, on all ranks.

A run begins with all main params in host memory. Its first steps are measured: the host's update takes ``busy``
seconds, and modules stand still for ``stalled`` of them. The update runs in the order of forward, so that what is not
hidden is its end, and a share of ``1 - stalled / busy`` of it would be hidden whole. Then ranks agree on the largest
such fraction that suits all of them, and state moves, once.
"""

from collections.abc import Sequence
from math import ceil
from statistics import median
from typing import NamedTuple

from torch.distributed import ProcessGroup

from megascale.main_params.offload_meter import OffloadMeter, OffloadSeconds
from megascale.utils.collectives import all_gather_object

EVERY = 8
"""Ranks look at their measurements each time after so many steps, until each has measured enough."""
WARM_UP, LEAST_STEPS = 2, 3
"""Landed steps that are left out, as memory is allocated in them, and how many more there must be."""
NEGLIGIBLE = 0.02
"""A smaller share of the update that modules stand still for is taken for noise."""
GRAIN = 64
"""Fractions are multiples of one in so many."""


class Proposal(NamedTuple):
    """What one rank can do.

    Attributes:
        hidden: the largest fraction whose update would be hidden.
        needed: the smallest fraction that leaves the device enough memory.
    """

    hidden: float
    needed: float


def hidden_fraction(fraction: float, measured: Sequence[OffloadSeconds]) -> float | None:
    """Return the largest fraction whose update is hidden; None where too few steps have landed.

    ``measured``: of the steps that landed, with ``fraction`` in host memory.
    """
    chosen = measured[WARM_UP:]
    if len(chosen) < LEAST_STEPS:
        return None
    busy, stalled = median(one.busy for one in chosen), median(one.stalled for one in chosen)
    if busy <= 0 or stalled <= NEGLIGIBLE * busy:
        return fraction
    return max(1, ceil(GRAIN * fraction * (1 - stalled / busy))) / GRAIN


def needed_fraction(room: int | None, nbytes: int) -> float:
    """Return the smallest fraction that fits.

    Args:
        room: bytes that are left on the device; None: not known.
        nbytes: of main params and state that are in host memory now, which is all of them.
    """
    if room is None or nbytes <= room:
        return 0.0
    return ceil(GRAIN * (1 - max(0, room) / nbytes)) / GRAIN


class OffloadTuner:
    """Finds the fraction once.

    Args:
        meter: of this rank's steps.
        group: the ranks that step together.

    Attributes:
        is_open: whether the fraction is yet to be found.
    """

    def __init__(self, meter: OffloadMeter, group: ProcessGroup | None) -> None:
        self.meter = meter
        self.is_open = True
        self._group = group

    def is_due(self, steps: int) -> bool:
        """Whether ranks exchange proposals before the next step. ``steps``: taken so far, the same on all ranks."""
        return self.is_open and steps > 0 and steps % EVERY == 0

    def agree(self, proposal: Proposal | None) -> float | None:
        """Return the fraction that all ranks take, and measure no more; None while a rank has no proposal.

        All ranks call it together.
        """
        every = all_gather_object(proposal, self._group)
        given = [Proposal(*one) for one in every if one is not None]
        if len(given) < len(every):
            return None
        self.close()
        return min(1.0, max(min(one.hidden for one in given), *(one.needed for one in given)))

    def close(self) -> None:
        """Leave the fraction as it is."""
        self.is_open = False
        self.meter.stop()
