"""Time the kernels of megascale's step on a GPU, one by one, and what a step takes beside them.

    python benchmarks/kernels.py --numel 300_000_000 --tensors 1,300,2000 --out benchmarks/results/kernels_gpu.md

First table: every rule of update and way of holding state, the device's own time of the statistics' kernel and of the
update's, by torch's profiler, as bytes per second and as a share of a copy's in the same run. The last
row is torch's fused AdamW, which moves as many bytes, and neither checks, clips nor rounds into 16-bit parameters.

``--registers 80,96,104,128`` compiles the update of 8-bit moments once per limit, and adds its rows with what the
compiler made of it.

Second table: one step of AdamW on fp16 parameters, by the number of tensors. *device*: replays of a graph of the step,
one after the other. *replay* and *eager*: a step alone, from an idle device until it is idle again. *host*: until the
call of an eager step returns. Between steps of training the device is busy, so that the host's time hides behind it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from backend import print_backend
from graph import optimizer_of
from peers.contenders import OURS
from peers.matrix import named
from peers.report import place
from peers.rules import ADAMW, FP32_MOMENTS, RULES
from peers.work import Work, given_work
from torch._C._autograd import DeviceType

from megascale import StepGraph
from megascale.kernels.triton import backend, launch

CODES = (torch.int8, torch.uint8)
KINDS = [  # rule, dtype of parameters, dtypes of moments, remainders in place of main params
    (ADAMW, torch.float16, FP32_MOMENTS, False),
    (ADAMW, torch.bfloat16, FP32_MOMENTS, False),
    (ADAMW, torch.float32, FP32_MOMENTS, False),
    (ADAMW, torch.bfloat16, (torch.bfloat16, torch.float32), False),
    (ADAMW, torch.bfloat16, CODES, False),
    (ADAMW, torch.bfloat16, FP32_MOMENTS, True),
    (ADAMW, torch.bfloat16, CODES, True),
    ("momentum", torch.float16, FP32_MOMENTS, False),
    ("lion", torch.float16, FP32_MOMENTS, False),
]
UPDATE = "update_kernel"
STEPS = 8
Kind = tuple[str, torch.dtype, tuple[torch.dtype, torch.dtype], bool]


def device_times(step: Callable[[], object]) -> dict[str, list[float]]:
    """Return microseconds of the kernels of some steps, by kernel."""
    times: dict[str, list[float]] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return times


def copy_bandwidth(numel: int) -> float:
    """Return GB/s of a copy of ``numel`` fp32 numbers, read and written: the median of some."""
    source = torch.randn(numel, device="cuda")
    target = torch.empty_like(source)
    times = device_times(lambda: target.copy_(source))
    return max(8 * numel / statistics.median(each) / 1e3 for each in times.values())


def cells(name: str, what: str, moved: int, numel: int, times: list[float], copy: float) -> str:
    """Return a line of the first table. ``times``: microseconds; ``moved``: bytes per parameter."""
    median = statistics.median(times)
    speed = moved * numel / median / 1e3
    taken = " | ".join(f"{each / 1e3:.3f}" for each in (median, min(times), max(times)))
    return f"| {name} | {what} | {moved} | {taken} | {speed:.0f} | {speed / copy:.2f} |"


def rows_of_registers(given: argparse.Namespace, tensors: int, device: torch.device, copy: float) -> list[str]:
    """Return the update's rows of 8-bit moments by the limit of registers, with those that it has, and its spills."""
    rows, usual = [], backend.CODES_OPTIONS
    for limit in map(int, given.registers.split(",")):
        backend.CODES_OPTIONS = {**usual, "maxnreg": limit}
        for kind in (kind for kind in KINDS if kind[2] == CODES):
            launch._COMPILED.clear()
            _, update = rows_of_kernels(given_work(given.numel, tensors, kind[1], device), kind, copy)
            codes = [code for code, _ in launch._COMPILED.values() if code.name == UPDATE]
            made = ", ".join(f"{code.n_regs} registers, {code.n_spills} spills" for code in codes)
            rows.append(update.replace("update and write back", f"at most {limit}: {made}"))
    backend.CODES_OPTIONS = usual
    return rows


def rows_of_kernels(work: Work, kind: Kind, copy: float) -> list[str]:
    """Return the rows of one way to hold state."""
    rule, dtype, moments, held = kind
    options = {"rule": rule, "moments": moments, "remainders": held, "backend": "triton"}
    stepper = replace(OURS, options=options).make(work)
    for _ in range(3):
        stepper.step()
    times = device_times(stepper.step)
    states = [named(moment) for moment, count in zip(moments, RULES[rule].states, strict=True) if count]
    name = f"{rule}, {named(dtype)}, {'/'.join(states)}{', remainders' if held else ''}"
    found = {"statistics": "measure_kernel", "update and write back": UPDATE}
    return [cells(name, what, stepper.traffic[what], work.numel, times[kernel], copy) for what, kernel in found.items()]


def row_of_torch(numel: int, tensors: int, copy: float) -> str:
    """Return the row of torch's fused AdamW on fp32 parameters."""
    work = given_work(numel, tensors, torch.float32, torch.device("cuda"))
    params = work.parameters_with_grads()
    optimizer = torch.optim.AdamW(params, fused=True)
    optimizer.step()
    launched = [sum(each) / STEPS for name, each in device_times(optimizer.step).items() if "multi_tensor" in name]
    return cells("torch's fused AdamW, float32", "update alone", 28, work.numel, [sum(launched)], copy)


def waited(step: Callable[[], object], whole: bool) -> list[float]:
    """Return milliseconds of steps that begin on an idle device, until it is idle again, or until the call returns."""
    times = []
    for _ in range(3 * STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if whole:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return times


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Return milliseconds of a replay on a device that is kept busy."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(2 * STEPS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / (2 * STEPS)


def row_of_step(numel: int, tensors: int, copy: float) -> str:
    """Return the row of a number of tensors."""
    _, optimizer = optimizer_of(numel, tensors, "triton")
    for _ in range(3):
        optimizer.step()
    eager, host = waited(optimizer.step, True), waited(optimizer.step, False)
    graph = StepGraph(optimizer)
    device = replayed(graph._graph)
    replay = waited(graph.replay, True)
    paper = 30 * numel / copy / 1e6
    parts = [f"{tensors:,}", f"{paper:.2f}", f"{device:.2f}", f"{paper / device:.2f}"]
    for times in (replay, eager, host):
        parts.append(f"{statistics.median(times):.2f} ({min(times):.2f}, {max(times):.2f})")
    return f"| {' | '.join(parts)} |"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=300_000_000)
    parser.add_argument("--tensors", default="1,300,2000")
    parser.add_argument("--registers", default="", help="limits to compile the update of 8-bit moments with")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print_backend()
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py: there is no CUDA device here", file=sys.stderr)
        return 2
    device, counts = torch.device("cuda"), [int(count) for count in given.tensors.split(",")]
    tensors = max(count for count in counts if count <= 300)
    copy = copy_bandwidth(given.numel)
    lines = [
        f"## Kernels of the step on {torch.cuda.get_device_name()}",
        "",
        place(device, torch.get_num_threads()),
        "",
        f"`python benchmarks/kernels.py --numel {given.numel} --tensors {given.tensors}`",
        "",
        f"A copy in the same run: {copy:.0f} GB/s, read and written.",
        "",
        f"### {given.numel:,} parameters in {tensors:,} tensors: the device's time of each kernel",
        "",
        "| rule, parameters, moments | kernel | bytes / parameter | median ms | min | max | GB/s | of a copy's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        lines += rows_of_kernels(given_work(given.numel, tensors, kind[1], device), kind, copy)
        torch.cuda.empty_cache()
    lines += rows_of_registers(given, tensors, device, copy) if given.registers else []
    lines += [
        row_of_torch(given.numel, tensors, copy),
        "",
        f"### One step of AdamW on {given.numel:,} fp16 parameters: ms, median (min, max)",
        "",
        "| tensors | on paper | device | of a copy's bandwidth | replay | eager | host |",
        "|---|---|---|---|---|---|---|",
        *(row_of_step(given.numel, count, copy) for count in counts),
    ]
    text = "\n".join(lines)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
