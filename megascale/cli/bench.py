"""``megascale bench``: time the step on this machine, beside its memory bandwidth."""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megascale.cli import bench_offload
from megascale.config import OptimizerConfig
from megascale.errors import ArgumentError
from megascale.estimation.traffic import traffic_per_element
from megascale.grad_scaler import DynamicGradScaler
from megascale.optimizer import MixedPrecisionOptimizer
from megascale.utils.wording import count

NAME = "bench"
HELP = "time AdamW's step with clipping, beside torch's own and this machine's memory bandwidth: half a minute"
AS_TYPED = {f"{name} must": f"--{name} must" for name in ("numel", "tensors", "seconds", "tokens", "dtype")}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
WARM_UP = 3
PROBE_BYTES = 1 << 28
"""Size of the probe's buffer, larger than any cache."""
NOISY, LOADED = 1.3, 0.5
"""From this ratio of the median round to the shortest one on, or above this load per core, a machine is busy."""
FEW = 5
"""Below this number of rounds a median is called doubtful."""
PROBE_SECONDS = 2.0
"""How long bandwidth alone is measured."""


class Timed(NamedTuple):
    """Times in seconds, one per round: of the step, of a pass that reads and writes bytes in place, and of torch's."""

    step: list[float]
    probe: list[float]
    torch: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--numel",
        type=float,
        default=5e7,
        help="parameters in all (default 5e7: 0.8 GB in fp16, and 0.8 GB for torch's optimizer)",
    )
    parser.add_argument("--tensors", type=int, default=200, help="tensors of equal size (default 200)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="of parameters and gradients (default fp16)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure (default 20)")
    parser.add_argument(
        "--offload",
        action="store_true",
        help="instead: measure the bus, the update in host memory and products of matrices, and print what of an "
        "iteration with main params and state in host memory is hidden",
    )
    parser.add_argument(
        "--tokens", type=float, default=32768, help="of a rank in a step, with --offload (default 32768)"
    )


def run(given: argparse.Namespace) -> int:
    """Time megascale's steps, torch's and in-place passes in turn, and print all three."""
    for name in ("numel", "tensors", "seconds", "tokens"):
        if not 0 < getattr(given, name) < math.inf:
            raise ArgumentError(f"{name} must be above 0 and finite, got {getattr(given, name)}")
    load = load_here()  # of other programs: before this one compiles anything
    length, dtype = max(int(given.numel) // given.tensors, 1), DTYPES[given.dtype]
    device = device_here()
    if given.offload:
        return _run_offload(given, [length] * given.tensors, device)
    optimizer = _optimizer([length] * given.tensors, dtype, device)
    by_torch = torchs_step(_params([length] * given.tensors, torch.float32, device), scales=dtype == torch.float16)
    probe = torch.zeros(PROBE_BYTES // 4, device=device)
    timed = _timed(lambda: optimizer.step(), lambda: probe.mul_(1.0), device, given.seconds, by_torch)
    print(
        f"AdamW with clipping, {length * given.tensors:,} {given.dtype} parameters in {given.tensors:,} tensors, "
        f"backend {optimizer.backend.name}, on {device} ({torch.get_num_threads()} threads)"
    )
    print("\n".join(told(timed, bytes_per_parameter(dtype), length * given.tensors, scales=dtype == torch.float16)))
    for doubt in doubts(timed, load, device):
        print(doubt)
    return 0


def _run_offload(given: argparse.Namespace, lengths: list[int], device: torch.device) -> int:
    """Measure and print what an offloaded step needs of this machine."""
    dtype = DTYPES[given.dtype]
    if dtype == torch.float32:
        raise ArgumentError("dtype must be fp16 or bf16 with --offload: an fp32 parameter is its own main param")
    print(f"Offloaded AdamW, {sum(lengths):,} {given.dtype} parameters in {len(lengths):,} tensors, on {device}")
    host = _optimizer(lengths, dtype, torch.device("cpu"))
    for line in bench_offload.lines(host, device, given.dtype, int(given.tokens), given.seconds, _seconds):
        print(line, flush=True)
    return 0


def told(timed: Timed, bytes_each: int, numel: int, *, scales: bool) -> list[str]:
    """Return the lines of results: medians, each with the shortest and the longest round.

    A ratio is that of one round, in which the machine was the same for both sides, and a median of those.
    """
    moved = bytes_each * numel
    rounds = list(zip(timed.step, timed.probe, timed.torch, strict=True))
    shares = [moved / step / (2 * PROBE_BYTES / probe) for step, probe, _ in rounds]
    unscale = "GradScaler, " if scales else ""
    return [
        f"step        {_span(timed.step, 1e3)} ms, median of {len(rounds)} rounds",
        f"moved       {bytes_each} bytes per parameter, {_span([moved / step for step in timed.step], 1e-9)} GB/s",
        f"bandwidth   {_span([2 * PROBE_BYTES / probe for probe in timed.probe], 1e-9)} GB/s, read and written back in "
        "place, in the same rounds",
        f"share       {_span(shares)} of the bandwidth in the same round",
        f"torch       {_span(timed.torch, 1e3)} ms, megascale takes "
        f"{_span([step / by_torch for step, _, by_torch in rounds])} of this in the same round",
        f"            fp32 parameters, {unscale}clip_grad_norm_, fused AdamW",
    ]


def doubts(timed: Timed, load: float | None, device: torch.device) -> list[str]:
    """Return what is printed where the results mean little, with the remedy: few rounds, a busy machine.

    Another program that uses cores or memory meanwhile makes some rounds longer, and none shorter: where the shortest
    rounds are much shorter than the median, they are those of a machine that is nearly idle.

    Args:
        load: the machine's load before the first round, per core; None: unknown.
    """
    said = []
    if (rounds := len(timed.step)) < FEW:
        said.append(f"few         {count(rounds, 'round')} of {FEW}: a median means little. Measure longer: --seconds")
    spread = max(statistics.median(times) / min(times) for times in timed)
    loaded = load is not None and load > LOADED and device.type == "cpu"
    if spread < NOISY and not loaded:
        return said
    reasons = [f"half of the rounds took {spread:.2f} times the shortest one or more"] * (spread >= NOISY)
    reasons += [f"the load was {load:.2f} per core before the first round"] * loaded
    shortest = Timed(*([min(times)] for times in timed))
    said += [
        f"busy        {', and '.join(reasons)}: other programs use this machine. Do not quote these times.",
        "            End those programs and repeat, or set OMP_NUM_THREADS to the number of cores that are free.",
        f"            Shortest rounds: step {shortest.step[0] * 1e3:.2f} ms, torch {shortest.torch[0] * 1e3:.2f} ms "
        f"({shortest.step[0] / shortest.torch[0]:.2f} of this), bandwidth "
        f"{2 * PROBE_BYTES / shortest.probe[0] / 1e9:.1f} GB/s",
    ]
    return said


def load_here() -> float | None:
    """Return the processes that wanted a core during the last minute, per core; None where the system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def _span(values: Sequence[float], unit: float = 1.0) -> str:
    """Return the median, and the smallest and the largest value, in multiples of 1 / ``unit``."""
    low, middle, high = (unit * one for one in (min(values), statistics.median(values), max(values)))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def bytes_per_parameter(dtype: torch.dtype) -> int:
    """Return the bytes that AdamW's step with clipping reads and writes per parameter, with fp32 moments."""
    return int(sum(traffic_per_element(dtype, dtype, (torch.float32, torch.float32))))


def device_here() -> torch.device:
    """Return this machine's accelerator, else its CPU. A torch that was built for CUDA may find no GPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def measured_bandwidth(device: torch.device | None = None) -> float:
    """Return bytes a second that are read and written in place on this machine: the median of a few seconds.

    ``device``: whose memory; None: the accelerator's, else the CPU's.
    """
    device = device or device_here()
    probe = torch.zeros(PROBE_BYTES // 4, device=device)
    timed = _timed(lambda: None, lambda: probe.mul_(1.0), device, PROBE_SECONDS, lambda: None)
    return 2 * PROBE_BYTES / statistics.median(timed.probe)


def _optimizer(lengths: list[int], dtype: torch.dtype, device: torch.device) -> MixedPrecisionOptimizer:
    params = _params(lengths, dtype, device)
    config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, clip_grad=1.0)
    scaler = DynamicGradScaler() if dtype == torch.float16 else None
    return MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=1e-4), config, scaler, grads_are_scaled=True)


def torchs_step(params: list[torch.nn.Parameter], *, scales: bool) -> Callable[[], object]:
    """Return torch's own step, of fp32 parameters that autocast computes with: with its GradScaler, or without."""
    device = params[0].device
    inner = torch.optim.AdamW(params, lr=1e-4, fused=True)
    # A scale of 1 takes the same time, and leaves the gradients as they are for the next round.
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=1 << 30, enabled=scales)
    scaler.scale(torch.zeros((), device=device))  # makes the scale's tensor

    def step() -> None:
        scaler.unscale_(inner)
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        scaler.step(inner)
        scaler.update()

    return step


def _params(lengths: list[int], dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    """Return parameters of zeros that have gradients."""
    try:
        params = [torch.nn.Parameter(torch.zeros(length, dtype=dtype, device=device)) for length in lengths]
        for param in params:
            param.grad = torch.full_like(param, 0.5)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise ArgumentError(f"numel must fit into the memory of {device}, got {sum(lengths):,}: {error}") from None
    return params


def _timed(
    step: Callable[[], object],
    probe: Callable[[], object],
    device: torch.device,
    seconds: float,
    by_torch: Callable[[], object],
) -> Timed:
    """Take turns until ``seconds`` have passed; the first rounds, which compile and load, are not counted."""
    found = Timed([], [], [])
    for _ in range(WARM_UP):
        _seconds(step, device), _seconds(probe, device), _seconds(by_torch, device)
    end = time.perf_counter() + seconds
    while not found.step or time.perf_counter() < end:
        found.probe.append(_seconds(probe, device))
        found.step.append(_seconds(step, device))
        found.torch.append(_seconds(by_torch, device))
    return found


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start
