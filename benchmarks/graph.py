"""Time the eager step against its replay in a CUDA graph, on the same tensors, and check that both leave the same bits.

    python benchmarks/graph.py --tensors 1,200,2000 --numel 50_000_000 --out benchmarks/results/graph_gpu.md

Small and numerous tensors show what a graph saves: the host's work. Prints milliseconds (median, min, max).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from backend import print_backend
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, StepGraph

SCALE = 2.0**16


def optimizer_of(numel: int, tensors: int, backend: str) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    """Return fp16 parameters with gradients, the same at every call, and their optimizer."""
    generator = torch.Generator("cuda").manual_seed(0)
    params = []
    for _ in range(tensors):
        value = torch.randn(numel // tensors, generator=generator, device="cuda")
        params.append(nn.Parameter((value * 0.02).half()))
        params[-1].grad = (value.flip(0) * 1e-4 * SCALE).half()
    config = OptimizerConfig(fp16=True, clip_grad=1.0, backend=backend)
    inner = torch.optim.AdamW(params, lr=torch.tensor(1e-4, dtype=torch.float64, device="cuda"))
    scaler = DynamicGradScaler(SCALE, 1.0, 2.0, 0.5, 1000, 2)
    return params, MixedPrecisionOptimizer(inner, config, scaler, grads_are_scaled=True)


def timed(step: Callable[[], object]) -> float:
    """Return milliseconds until the device has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def row(name: str, times: list[float], base: float) -> str:
    """Return one line of the table."""
    median = statistics.median(times)
    return f"| {name} | {median:.3f} | {min(times):.3f} | {max(times):.3f} | {median / base:.2f} |"


def compare(numel: int, tensors: int, backend: str, rounds: int) -> list[str]:
    """Return the table of one size."""
    eager_params, eager = optimizer_of(numel, tensors, backend)
    params, optimizer = optimizer_of(numel, tensors, backend)
    graph = StepGraph(optimizer)
    times: dict[str, list[float]] = {"eager": [], "replay": []}
    for index in range(rounds + 3):
        for name, step in (("eager", eager.step), ("replay", graph.replay)):
            elapsed = timed(step)
            if index >= 3:
                times[name].append(elapsed)
    pairs: list[tuple[Tensor, Tensor]] = list(zip(params, eager_params, strict=True))
    same = all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in pairs)
    base = statistics.median(times["eager"])
    return [
        f"### {numel:,} parameters in {tensors:,} tensors, backend {backend}: "
        + ("the same bits" if same else "OTHER BITS"),
        "",
        "| step | median ms | min | max | of eager |",
        "|---|---|---|---|---|",
        *(row(name, values, base) for name, values in times.items()),
        "",
    ]


def main() -> int:
    """Measure, print, write. Returns 1 where a replay left other bits than the eager step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--tensors", default="1,200,2000")
    parser.add_argument("--backends", default="triton,torch")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print_backend()
    if not torch.cuda.is_available():
        print("benchmarks/graph.py: there is no CUDA device here", file=sys.stderr)
        return 2
    lines = [f"## Replays of the step: torch {torch.__version__}, {torch.cuda.get_device_name()}", ""]
    for backend in given.backends.split(","):
        for tensors in map(int, given.tensors.split(",")):
            lines += compare(given.numel, tensors, backend, given.rounds)
    text = "\n".join(lines)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return int("OTHER BITS" in text)


if __name__ == "__main__":
    sys.exit(main())
