"""Build contenders, count what a step of each does, and time all of them interleaved."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from peers.contenders import Entry
from peers.measure import (
    count_host_syncs,
    count_launches,
    count_operators,
    held_bytes,
    live_bytes,
    peak_bytes,
    reset_peak,
    transient_bytes,
)
from peers.work import Stepper, UnavailableError, Work

WARM_UP = 2
"""Steps after the first, before anything is counted."""


@dataclass
class Counts:
    """What one step does.

    Attributes:
        operations: on CPU operators of torch that are dispatched, on CUDA kernels, copies and fills that are launched.
        host_reads: on CPU values that the host takes from a tensor, on CUDA waits of the host for the device.
        collectives: on two ranks; None where they were not counted.
        held: bytes per parameter just before the step: parameters, gradients, masters, state.
        peak: the same, at the worst moment of the step.
    """

    operations: int
    host_reads: int
    collectives: Counter[str] | None = None
    held: float | None = None
    peak: float | None = None


@dataclass
class Run:
    """One contender in one measurement. ``failure`` says why there are no times, or why they end early.

    Attributes:
        broken: the failure is an error, not something that is missing or too slow.
        backend: megascale's; empty for others.
        first_step: seconds of its first step, compilation included.
        times: milliseconds of each round.
        bandwidths: GB/s of the machine just before each round.
    """

    entry: Entry
    stepper: Stepper | None = None
    failure: str = ""
    broken: bool = False
    backend: str = ""
    first_step: float = 0.0
    counts: Counts | None = None
    times: list[float] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    traffic: dict[str, int] = field(default_factory=dict)
    sample: list[Tensor] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The contender's name, and which backend megascale chose where it was left to choose."""
        chosen = self.backend and self.entry.options.get("backend") is None
        return f"{self.entry.name} ({self.backend})" if chosen else self.entry.name

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.times)

    @property
    def bytes_per_parameter(self) -> int:
        """What a step has to move."""
        return sum(self.traffic.values())


class Bandwidth:
    """A pass over memory at the speed of this machine: on CPU in place over fp32, on a device a copy of fp32.

    It also leaves caches with nothing of the contender that comes next.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.device = device
        self.source = torch.zeros(numel, device=device)
        self.target = None if device.type == "cpu" else torch.zeros(numel, device=device)

    def measure(self) -> float:
        """Return GB/s of one pass."""
        synchronize(self.device)
        start = time.perf_counter()
        if self.target is None:
            self.source.add_(1)
        else:
            self.target.copy_(self.source)
        synchronize(self.device)
        return 8 * self.source.numel() / (time.perf_counter() - start) / 1e9


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def run_rounds(
    entries: Sequence[Entry],
    work: Work,
    rounds: int,
    bandwidth: Bandwidth,
    *,
    memory: bool = False,
    limit: float | None = None,
) -> list[Run]:
    """Time every contender once per round, in an order that rotates, see :func:`balanced_order`.

    A contender that cannot be built or fails stays in the result with the reason. ``memory``: count bytes too.
    ``limit``: seconds; one whose rounds would take longer is left out.
    """
    runs = [_started(entry, work, rounds, memory, limit) for entry in entries]
    ready = [run for run in runs if not run.failure]
    with garbage_outside():
        for index in range(rounds):
            for place in balanced_order(len(ready), index):
                if not ready[place].failure:
                    time_round(ready[place], work, bandwidth)
    for run in runs:
        if run.stepper is not None and not run.failure:
            params = run.stepper.parameters()
            run.sample = [params[i].detach().to(work.dtype).float().flatten().cpu() for i in (0, -1)]
        run.stepper = None
    _forget_groups()
    return runs


def balanced_order(number: int, index: int) -> list[int]:
    """Return the order of ``number`` contenders in round ``index``: a Williams design.

    It rotates from round to round, and over ``number`` rounds each contender follows all others about equally often:
    whoever comes after its like would otherwise always find its code in the caches.
    """
    zigzag = [step // 2 + 1 if step % 2 == 0 else -(step // 2 + 1) for step in range(number - 1)]
    return [(index + shift) % number for shift in [0, *zigzag][:number]]


def _started(entry: Entry, work: Work, rounds: int, memory: bool, limit: float | None) -> Run:
    """Build, warm up and count one contender."""
    run = Run(entry)
    before = _held(work.device) if memory else 0
    try:
        run.stepper = stepper = entry.make(work)
        # Some compile when they are built.
        run.first_step = _timed(stepper, work.device) + getattr(stepper, "setup_seconds", 0.0)
        run.traffic = stepper.traffic
        run.backend = getattr(stepper, "backend_name", "")
        start = time.perf_counter()
        for _ in range(WARM_UP):
            _timed(stepper, work.device)
        seconds = (time.perf_counter() - start) / WARM_UP
        if limit is not None and seconds * rounds > limit:
            run.failure = f"left out: a round takes {seconds:.2g} s, {rounds} of them more than {limit:g} s"
        else:
            run.counts = _counted(stepper, work, before, memory)
    except UnavailableError as reason:
        run.failure = str(reason)
    except Exception as error:
        _break(run, error)
    if run.failure:
        run.stepper = None
        gc.collect()
    return run


def _tidy_heap() -> None:
    """Allocate as the next forward would: glibc then sorts, 10,000 at a time, the pieces that backward has freed.

    A given backward leaves hundreds of thousands of them where there are 100,000 gradients. Sorting them takes up to
    50 ms, which is no part of the step that happens to come next.
    """
    _held_together = [torch.empty(1 << 12) for _ in range(128)]


def _break(run: Run, error: Exception) -> None:
    run.failure = f"{type(error).__name__}: {error}"
    run.broken = True
    run.stepper = None


def _counted(stepper: Stepper, work: Work, before: int, memory: bool) -> Counts:
    stepper.prepare()
    if work.device.type == "cuda":
        operations = count_launches(stepper.step)
        stepper.prepare()
        host_reads = count_host_syncs(stepper.step)
    else:
        operations, host_reads = count_operators(stepper.step)
    counts = Counts(operations, host_reads)
    if memory:
        stepper.prepare()
        held = _held(work.device) - before
        if work.device.type == "cpu":
            peak = held + transient_bytes(stepper.step)
        else:
            reset_peak(work.device)
            stepper.step()
            synchronize(work.device)
            peak = (peak_bytes(work.device) or 0) - before
        # The shared gradients were there before.
        shared = 0 if stepper.own_grad_bytes else work.dtype.itemsize
        counts.held, counts.peak = held / work.numel + shared, peak / work.numel + shared
    return counts


def _held(device: torch.device) -> int:
    if device.type == "cpu":
        return live_bytes()
    gc.collect()
    synchronize(device)
    return held_bytes(device) or 0


def _timed(stepper: Stepper, device: torch.device) -> float:
    """Return seconds of one step."""
    stepper.prepare()
    synchronize(device)
    start = time.perf_counter()
    stepper.step()
    synchronize(device)
    return time.perf_counter() - start


def time_round(run: Run, work: Work, bandwidth: Bandwidth) -> None:
    """Time one step, after a pass that measures the bandwidth. Where it fails, the run says so."""
    stepper = run.stepper
    if stepper is None:
        return
    try:
        stepper.prepare()
        gc.collect()
        _tidy_heap()
        gigabytes = bandwidth.measure()
        synchronize(work.device)
        start = time.perf_counter()
        stepper.step()
        synchronize(work.device)
        run.times.append((time.perf_counter() - start) * 1e3)
        run.bandwidths.append(gigabytes)
    except Exception as error:
        _break(run, error)


@contextmanager
def garbage_outside() -> Iterator[None]:
    """Let Python's garbage be collected between steps: within one, it would walk the objects of all contenders."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _forget_groups() -> None:
    """End the process groups that a contender has needed: the next measurement begins without."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
