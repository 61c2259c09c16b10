"""``megascale bench --offload``: rates of an offloaded step on this machine, and what of one iteration they hide."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megascale.estimation import estimate
from megascale.estimation.timeline import Machine, timeline
from megascale.estimation.traffic import ON_HOST
from megascale.kernels import NativeBackend, host_backend
from megascale.optimizer import MixedPrecisionOptimizer

COPY_BYTES = 1 << 28
"""Of a copy between host and device, and of the probe of the device's memory."""
WIDTH, WIDTH_ON_CPU = 8192, 1024
"""Rows of the square matrices whose product is timed."""
Timer = Callable[[Callable[[], object], torch.device], float]
"""Returns the seconds of work, from an idle device until it is idle again."""


def lines(
    host: MixedPrecisionOptimizer, device: torch.device, precision: str, tokens: int, seconds: float, timer: Timer
) -> Iterator[str]:
    """Yield the rates, each a median of rounds, and one iteration of ``host``'s parameters by these rates.

    Args:
        host: AdamW of parameters in host memory, all of one shape, which have gradients.
        device: whose forward and backward hide the rest. A CPU: other host memory stands for a device's.
        precision: of the parameters: "fp16" or "bf16".
        tokens: of one step.
        seconds: how long to measure in all.
    """
    params = [param for group in host.param_groups for param in group["params"]]
    share = seconds / 4
    if device.type == "cpu":
        yield "device      no accelerator here: a CPU computes, and host memory stands for a device's"
    flops, width = _flops(device, params[0].dtype, share, timer)
    yield f"operations  {flops / 1e12:.2f} TFLOP/s, products of {precision} matrices of {width:,} rows"
    bus, both = bus_bandwidths(device, share, timer)
    yield f"bus         {bus / 1e9:.2f} GB/s in the slower direction, {both / 1e9:.2f} GB/s each way at once"
    update, threads = update_seconds(host, share)
    shapes = [param.shape for param in params]
    there: dict[str, Any] = {"precision": precision, "optimizer_cpu_offload": True}
    found = estimate(shapes, **there, overlap_cpu_optimizer_d2h_h2d=True)
    host_bandwidth = found.offload[ON_HOST] / update
    yield f"update      {update * 1e3:.2f} ms in host memory, {threads} threads, {host_bandwidth / 1e9:.2f} GB/s"
    probe = torch.zeros(COPY_BYTES // 4, device=device)
    memory = 2 * COPY_BYTES / _median(lambda: probe.mul_(1.0), device, share, timer)
    yield f"memory      {memory / 1e9:.2f} GB/s, read and written back on {device}"
    machine = Machine(flops=flops, memory_bandwidth=memory, bus_bandwidth=both, host_bandwidth=host_bandwidth)
    yield f"\nBy these rates, with {tokens:,} tokens in a step, and the update in host memory overlapping forward:"
    yield from timeline(found, machine, tokens=tokens).lines()
    yield "\nWith main params and state that visit the device, optimizer_offload_compute='device':"
    visits = estimate(shapes, **there, optimizer_offload_compute="device")
    yield from timeline(visits, machine, tokens=tokens).lines()


def _flops(device: torch.device, dtype: torch.dtype, seconds: float, timer: Timer) -> tuple[float, int]:
    """Return 16-bit operations a second in products of matrices, and their width."""
    width = WIDTH_ON_CPU if device.type == "cpu" else WIDTH
    one = torch.ones(width, width, dtype=dtype, device=device)
    out = torch.empty_like(one)
    return 2 * width**3 / _median(lambda: torch.mm(one, one, out=out), device, seconds, timer), width


def bus_bandwidths(device: torch.device, seconds: float, timer: Timer) -> tuple[float, float]:
    """Return bytes a second between host and device: in the slower direction, and each way while both are busy."""
    pin = device.type != "cpu"
    there = [torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pin) for _ in range(2)]

    def down() -> None:
        here[0].copy_(there[0], non_blocking=True)

    def up() -> None:
        there[1].copy_(here[1], non_blocking=True)

    side = torch.Stream(device) if pin else None

    def both() -> None:
        down()
        if side is None:
            up()
        else:
            with side:
                up()

    down_alone, up_alone, at_once = (_median(one, device, seconds / 3, timer) for one in (down, up, both))
    return COPY_BYTES / max(down_alone, up_alone), COPY_BYTES / at_once


def update_seconds(host: MixedPrecisionOptimizer, seconds: float) -> tuple[float, int]:
    """Return the median of an update whose statistics are known, with the threads of an offloaded one, and these."""
    backend, before = host_backend(), torch.get_num_threads()
    threads = backend.num_threads() if isinstance(backend, NativeBackend) else before
    torch.set_num_threads(threads)
    try:
        end, found = time.perf_counter() + seconds, list[float]()
        while len(found) < 2 or time.perf_counter() < end:
            host.prepare_grads()
            start = time.perf_counter()
            host.step_with_ready_grads()
            found.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return statistics.median(found[1:]), threads


def _median(work: Callable[[], object], device: torch.device, seconds: float, timer: Timer) -> float:
    timer(work, device)
    end, found = time.perf_counter() + seconds, list[float]()
    while not found or time.perf_counter() < end:
        found.append(timer(work, device))
    return statistics.median(found)
