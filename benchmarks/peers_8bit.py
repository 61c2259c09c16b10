"""Times one step of AdamW with 8-bit moments beside torchao's and bitsandbytes', on the CPU and fp32 parameters.

    pip install --no-deps torchao bitsandbytes
    python benchmarks/peers_8bit.py --numel 20000000 --tensors 20 --rounds 15 --threads 2

All take turns, on the same gradients. A ratio compares a contender's step with ours of the same round; the table has
medians of both (smallest to largest). megascale's steps also look for inf and NaN in the gradients and measure their
norm; the others do not. torchao compiles its step with torch.compile in the warm-up, which is not timed. What is not
installed has no row.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from backend import print_backend
from torch.nn import Parameter

from megascale import MixedPrecisionOptimizer, OptimizerConfig

OURS, WARM_UP, RATE, DECAY = "megascale, 8-bit moments", 3, 1e-3, 0.01
CODES: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
Make = Callable[[list[Parameter]], torch.optim.Optimizer]


def plain(params: list[Parameter]) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(params, RATE, weight_decay=DECAY, fused=True)


def ours(params: list[Parameter], **states: Any) -> torch.optim.Optimizer:
    """Return ours, without clipping."""
    return MixedPrecisionOptimizer(plain(params), OptimizerConfig(**states))


def contenders() -> dict[str, Make]:
    """Return what can be timed here, by name."""
    found: dict[str, Make] = {
        OURS: lambda params: ours(params, **CODES),
        "megascale, fp32 moments": ours,
        f"torch {torch.__version__}, fused, fp32 moments": plain,
    }
    for package, module in {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}.items():
        try:
            kind = importlib.import_module(module).AdamW8bit
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            continue
        found[f"{package} {version(package)}, 8-bit moments"] = _peer(kind)
    return found


def _peer(kind: Any) -> Make:
    return lambda params: kind(params, lr=RATE, weight_decay=DECAY)


def measure(given: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each round."""
    generator = torch.Generator().manual_seed(0)
    shape = (given.numel // given.tensors,)
    starts = [torch.randn(shape, generator=generator) for _ in range(given.tensors)]
    grads = [torch.randn(shape, generator=generator) for _ in starts]
    optimizers = {}
    for name, make in contenders().items():
        params = [Parameter(start.clone()) for start in starts]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizers[name] = make(params)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(WARM_UP + given.rounds):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(seconds: dict[str, list[float]]) -> str:
    """Return a Markdown table."""
    lines = ["| AdamW | ms | ours, 8-bit moments / it |", "|---|---|---|"]
    for name, times in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds[OURS], times, strict=True)]
        lines.append(f"| {name} | {_cell([1e3 * one for one in times], '.1f')} | {_cell(ratios, '.2f')} |")
    return "\n".join(lines)


def _cell(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"numel": 20_000_000, "tensors": 20, "rounds": 15, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args()
    print_backend()
    torch.set_num_threads(given.threads)
    text = table(measure(given))
    print(text)
    if given.out is not None:
        given.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
