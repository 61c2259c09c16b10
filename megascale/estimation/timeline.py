"""When each part of an offloaded step runs, on a given device, bus and host: what is hidden, and what is not."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megascale.errors import ArgumentError
from megascale.estimation.estimates import Estimate
from megascale.estimation.partition import Partition
from megascale.estimation.traffic import (
    MEASURE,
    ON_HOST,
    STATE_TO_DEVICE,
    STATE_TO_HOST,
    TO_DEVICE,
    TO_HOST,
    UPDATE,
)
from megascale.main_params.grad_memory import SLOTS
from megascale.utils import validate

DEVICE, DOWN, HOST, UP = "device", "to the host", "host", "to the device"
LANES = (DEVICE, DOWN, HOST, UP)
"""What works at the same time."""
BACKWARD, FORWARD, REDUCE, GATHER = "backward", "next forward", "other messages", "gather weights"
WAIT = "waits for the copies"
BUSES = {"pcie4": 25e9, "pcie5": 53e9, "nvlink-c2c": 400e9}
"""Bytes a second, each way. PCIe 5: as an H100 has copied pinned memory; the others: about 0.8 to 0.9 of their makers'
figures."""
DEVICES = {
    **{"h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "b200": (2250e12, 8e12), "a100": (312e12, 2.0e12)},
    **{"a100-40": (312e12, 1.55e12), "l40s": (362e12, 0.86e12), "rtx4090": (165e12, 1.0e12), "a10": (125e12, 0.6e12)},
}
"""Dense 16-bit operations and bytes of memory a second, as makers name them."""
UTILIZATION = 0.4
"""The share of a maker's operations that forward and backward reach."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What an offloaded step runs on. All fields are above 0; see :data:`DEVICES` and :data:`BUSES` for figures.

    Attributes:
        flops: 16-bit operations a second that forward and backward reach.
        memory_bandwidth: bytes a second that the device reads and writes in its memory.
        bus_bandwidth: bytes a second between device and host, each way at the same time.
        host_bandwidth: bytes a second that this rank's share of the host reads and writes in its update.
        link_bandwidth: bytes a second that leave a rank; None: messages take no time.

    Raises:
        ArgumentError, ArgumentTypeError: naming the field.
    """

    flops: float
    memory_bandwidth: float
    bus_bandwidth: float
    host_bandwidth: float
    link_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bandwidth", "bus_bandwidth", "host_bandwidth"):
            validate.positive(name, getattr(self, name))
        if self.link_bandwidth is not None:
            validate.positive("link_bandwidth", self.link_bandwidth)


class Span(NamedTuple):
    """Work of one lane, from ``begin`` to ``end`` in seconds from the begin of backward."""

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """One iteration: backward, the step, and the next forward.

    Attributes:
        spans: in the order of their begin, lane by lane.
        compute: seconds of backward and forward.
    """

    spans: list[Span]
    compute: float

    @property
    def total(self) -> float:
        """Seconds from the begin of backward to the end of the next forward, when all weights are there."""
        return max(span.end for span in self.spans)

    @property
    def exposed(self) -> float:
        """Seconds of the iteration beside backward and forward."""
        return self.total - self.compute

    def seconds(self) -> dict[str, tuple[float, float]]:
        """Return, for each kind of work beside backward and forward, its seconds, and those that these two hide."""
        work = [span for span in self.spans if span.name in (BACKWARD, FORWARD)]
        found: dict[str, tuple[float, float]] = {}
        for span in self.spans:
            if span.name in (BACKWARD, FORWARD, WAIT):
                continue
            taken = span.end - span.begin
            hidden = sum(max(0.0, min(span.end, one.end) - max(span.begin, one.begin)) for one in work)
            before = found.get(span.name, (0.0, 0.0))
            found[span.name] = (before[0] + taken, before[1] + min(hidden, taken))  # the sum is rounded
        return found

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield a table of what takes how long, and how much of it is hidden."""
        yield f"One iteration: {self.total * 1e3:,.1f} ms, of which forward and backward {self.compute * 1e3:,.1f} ms"
        for name, (seconds, hidden) in self.seconds().items():
            yield f"  {name:<26}{seconds * 1e3:>12,.1f} ms, {hidden * 1e3:,.1f} ms behind forward and backward"
        yield f"  {'not hidden':<26}{self.exposed * 1e3:>12,.1f} ms"


def timeline(found: Estimate, machine: Machine, *, tokens: int) -> Timeline:
    """Return when each part of one iteration runs: backward, the step and the next forward of one rank.

    The step is the library's: the device measures, sends gradients slice by slice, and goes on to forward; the host
    updates a slice when its gradients are there, and its weights travel while it updates the next. With
    ``overlap_cpu_optimizer_d2h_h2d`` forward waits for each slice's own weights, else for all, and gradients travel
    during backward, except those that DistributedDataParallel or gloo averages, as soon as all of a slice are final;
    messages are taken to follow backward, the updates to follow all copies. Slices that share memory for gradients
    travel in the step, each once the one before the last is updated, and forward follows them. A DistributedOptimizer
    is taken to gather after its last slice, although it gathers bucket by bucket: its time is an upper bound. Forward
    takes 2 operations per parameter and token, backward 4: attention's products and recomputation come on top. Launches
    and the host's own time are not counted, and messages overlap nothing.

    Args:
        found: of a run with or without ``optimizer_cpu_offload``.
        machine: what it runs on.
        tokens: of one rank in one step.

    Raises:
        ArgumentError, ArgumentTypeError: if ``tokens`` is no integer, or below 1.
    """
    forward = 2 * found.sizes.numel * validate.integer("tokens", tokens, minimum=1) / machine.flops
    lanes = _Lanes()
    sent = sum(call.sent for call in found.collectives if "gather" not in call.operation)
    updated_here = 0 if found.setup.state_visits_device else found.moved[UPDATE]
    lanes.run(DEVICE, BACKWARD, 2 * forward)
    lanes.run(DEVICE, REDUCE, sent / (machine.link_bandwidth or math.inf))
    lanes.run(DEVICE, MEASURE, found.moved[MEASURE] / machine.memory_bandwidth)
    lanes.run(DEVICE, UPDATE, updated_here / machine.memory_bandwidth)
    partition = Partition(found.sizes, found.setup)
    slices = partition.slices()
    arrived = (_visit if found.setup.state_visits_device else _offload)(found, machine, partition, lanes)
    overlaps = found.setup.overlap_cpu_optimizer_d2h_h2d and not found.setup.is_sharded
    ready = arrived[-1] if slices and not overlaps else 0.0
    gathered = sum(call.sent for call in found.collectives if "gather" in call.operation)
    lanes.run(DEVICE, GATHER, gathered / (machine.link_bandwidth or math.inf), ready)
    everything = sum(partition.kept.values())
    for numel, weights in zip([everything - sum(slices), *slices], [0.0, *arrived], strict=True):
        lanes.run(DEVICE, FORWARD, forward * numel / max(everything, 1), weights if overlaps else ready)
    return Timeline(lanes.spans, 3 * forward)


class _Lanes:
    """What each lane does, one piece of work after the other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.free_at = dict.fromkeys(LANES, 0.0)

    def run(self, lane: str, name: str, seconds: float, after: float = 0.0) -> float:
        """Add work, if it takes any time, when the lane is free, and not before ``after``. Returns when it ends."""
        begin = max(self.free_at[lane], after)
        self.free_at[lane] = end = begin + seconds
        if seconds > 0:
            self.spans.append(Span(lane, name, begin, end))
        return end

    def wait_on_device(self, until: float) -> None:
        """Let the device stand still."""
        self.run(DEVICE, WAIT, max(until - self.free_at[DEVICE], 0.0))


def _offload(found: Estimate, machine: Machine, partition: Partition, lanes: _Lanes) -> list[float]:
    """Add the copies and the updates of slices; return when the weights of each have arrived."""
    slices = partition.slices()
    elements = max(sum(slices), 1)
    down, up, update = (found.offload.get(name, 0) / elements for name in (TO_HOST, TO_DEVICE, ON_HOST))
    shared, early = set(partition.grad_layout().shared), set[int]()
    if found.setup.copies_in_backward:
        final = _final(partition, lanes.spans)
        early = set(range(len(slices))).difference(shared)
        for at in sorted(early, reverse=True):
            lanes.run(DOWN, TO_HOST, slices[at] * down / machine.bus_bandwidth, final[at])
    decided = max(lanes.free_at[DEVICE], lanes.free_at[DOWN])  # the decision's numbers follow these copies
    arrivals, free = [], [0.0] * SLOTS
    for at, numel in enumerate(slices):
        sent = decided
        if at not in early:
            room = free[0] if at in shared else 0.0
            sent = lanes.run(DOWN, TO_HOST, numel * down / machine.bus_bandwidth, max(decided, room))
        updated = lanes.run(HOST, ON_HOST, numel * update / machine.host_bandwidth, sent)
        if at in shared:
            free = [*free[1:], updated]
        arrivals.append(lanes.run(UP, TO_DEVICE, numel * up / machine.bus_bandwidth, updated))
    lanes.wait_on_device(lanes.free_at[DOWN])  # the stream of forward waits for the copies
    return arrivals


def _final(partition: Partition, spans: Sequence[Span]) -> list[float]:
    """Return when backward, or the messages that follow it, are done with the gradients of each slice, the last first.

    What stays on the device comes first in forward.
    """
    last = [span for span in spans if span.name in (BACKWARD, REDUCE)][-1]
    slices, everything = partition.slices(), sum(partition.kept.values())
    return [last.begin + (last.end - last.begin) * sum(slices[at:]) / everything for at in range(len(slices))]


def _visit(found: Estimate, machine: Machine, partition: Partition, lanes: _Lanes) -> list[float]:
    """Add the visits of slices, two of which are on the device at once; return when each is updated.

    What stays on the device is taken to be updated with them.
    """
    slices = partition.slices()
    elements = max(sum(slices), 1)
    up, down = (found.offload.get(name, 0) / elements for name in (STATE_TO_DEVICE, STATE_TO_HOST))
    update = found.moved[UPDATE] / elements
    leaves, updates = [lanes.free_at[DEVICE]] * 2, []
    for numel in slices:
        arrived = lanes.run(UP, STATE_TO_DEVICE, numel * up / machine.bus_bandwidth, leaves[-2])
        lanes.wait_on_device(arrived)
        updates.append(lanes.run(DEVICE, UPDATE, numel * update / machine.memory_bandwidth, arrived))
        leaves.append(lanes.run(DOWN, STATE_TO_HOST, numel * down / machine.bus_bandwidth, updates[-1]))
    return updates


def machine_of(
    gpu: str, bus: str, host_bandwidth: float, *, flops: float | None = None, link_bandwidth: float | None = None
) -> Machine:
    """Return a machine by names.

    Args:
        gpu: a key of :data:`DEVICES`.
        bus: a key of :data:`BUSES`, or a number of GB a second.
        host_bandwidth, link_bandwidth: see :class:`Machine`.
        flops: that are reached; None: :data:`UTILIZATION` of the maker's.

    Raises:
        ArgumentError: naming the argument and what it may be.
    """
    if gpu.lower() not in DEVICES:
        raise ArgumentError(f"gpu must be one of {', '.join(DEVICES)} for a timeline, got {gpu!r}")
    most, memory_bandwidth = DEVICES[gpu.lower()]
    try:
        rate = BUSES.get(bus.lower()) or float(bus) * 1e9
    except ValueError:
        raise ArgumentError(f"bus must be one of {', '.join(BUSES)}, or a number of GB a second, got {bus!r}") from None
    return Machine(
        flops=flops or UTILIZATION * most,
        memory_bandwidth=memory_bandwidth,
        bus_bandwidth=validate.positive("bus", rate),
        host_bandwidth=host_bandwidth,
        link_bandwidth=link_bandwidth,
    )
