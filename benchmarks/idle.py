"""How long an accelerator stands still while AdamW trains a stack of layers: what it is not told in time.

    python benchmarks/idle.py --numel 1_000_000_000 --width 8192 --tokens 32768 --out benchmarks/results/idle_gpu.md

torch's profiler notes when each kernel and copy of a few iterations ran. *idle*: when none did, between the first and
the last. The host reads each step's numbers in the next one, so that it is never more than one step ahead: *step()
returns* is how long it waits for that, and idle tells whether the device waits, too.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import torch
from offload import Run, timed
from torch.profiler import ProfilerActivity, profile

ITERATIONS = 3


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1_000_000_000)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/idle.py needs a GPU: torch's profiler is to note when its kernels ran")
    device = torch.device("cuda")
    run = Run(device, given.numel, given.width, given.tokens, {})
    run.iterate(3)
    run.returns.clear()
    iteration = timed(device, lambda: run.iterate(5)) / 5
    returns = statistics.median(run.returns)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run.iterate(ITERATIONS)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    idle, end, kernels = 0.0, spans[0][0], defaultdict[str, float](float)
    for start, stop, name in spans:
        idle += max(0.0, start - end) / 1e3
        end = max(end, stop)
        kernels[name] += (stop - start) / 1e3 / ITERATIONS
    ours = {name: taken for name, taken in kernels.items() if name in ("measure_kernel", "adam_kernel")}
    lines = [
        f"## What {torch.cuda.get_device_name()} waits for",
        "",
        f"torch {torch.__version__}; `python benchmarks/idle.py --numel {given.numel} --width {given.width} "
        f"--tokens {given.tokens}`",
        "",
        "| | ms per iteration |",
        "|---|---|",
        f"| iteration | {iteration:.1f} |",
        f"| step() returns | {returns:.1f} |",
        f"| idle | {idle / ITERATIONS:.2f} |",
        *(f"| {name} | {taken:.2f} |" for name, taken in ours.items()),
    ]
    print("\n".join(lines))
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
