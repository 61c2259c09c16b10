"""Time iterations of training that follow each other, as a program has them: the host runs ahead of the device.

    python benchmarks/loop.py --numel 300_000_000 --tensors 300,2000 --out benchmarks/results/loop_gpu.md

A stack of blocks of four tensors each (norm and linear, with biases) is trained by AdamW, clipping to norm 1. A step
that is timed alone hides what this shows: where the host is slower than the device, an iteration takes the host's
time. All rows take turns, some iterations each, from an idle device until it is idle again. *iteration*: one of these,
median (smallest to largest). *beside torch.amp*: the ratio to torch.amp's iteration of the same turn, median. *host*:
until the host has issued an iteration. Rows of libraries that are not installed are left out; StepGraph and FSDP2, on
one rank of NCCL, have theirs on CUDA.
"""

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend import print_backend
from peers.report import base_parser, place
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig, StepGraph

AMP = "torch.amp, fp32 parameters, fused AdamW"
PER_BLOCK = 4
WARM_UP = 12  # iterations: kernels compile, and the host's caches fill
COMPACT: dict[str, Any] = {
    "exp_avg_dtype": torch.int8,
    "exp_avg_sq_dtype": torch.uint8,
    "store_param_remainders": True,
}
PEERS = {
    "flashoptim": ("flashoptim", "FlashAdamW"),
    "torchao": ("torchao.optim", "AdamW8bit"),
    "bitsandbytes": ("bitsandbytes.optim", "AdamW8bit"),
}
"""Libraries with smaller state: the module and the class of AdamW, made with their defaults."""
Iterate = Callable[[], object]


class Blocks(nn.Module):
    """Residual blocks. ``skipped``: the one that takes no part, whose parameters get no gradient."""

    def __init__(self, numel: int, tensors: int) -> None:
        super().__init__()
        count = max(1, tensors // PER_BLOCK)
        self.width = max(8, int((numel / count) ** 0.5) // 8 * 8)
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, self.width)) for _ in range(count))
        self.blocks = nn.ModuleList(blocks)
        self.skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        """Return the blocks' output for activations of shape [tokens, width]."""
        for index, block in enumerate(self.blocks):
            if index != self.skipped:
                x = x + block(x)
        return x


def wrapped(model: Blocks, **options: Any) -> MixedPrecisionOptimizer:
    """Return megascale's AdamW for a model of 16 bits."""
    is_fp16 = next(model.parameters()).dtype == torch.float16
    config = OptimizerConfig(fp16=is_fp16, bf16=not is_fp16, clip_grad=1.0, **options)
    inner = torch.optim.AdamW(model.named_parameters(), lr=1e-5)
    return MixedPrecisionOptimizer(inner, config, DynamicGradScaler(2.0**10) if is_fp16 else None)


def ours(model: Blocks, x: Tensor, *, skips: bool = False, **options: Any) -> Iterate:
    """Return an iteration with megascale. ``skips``: another block has no gradients each time."""
    optimizer = wrapped(model, **options)

    def iterate() -> None:
        if skips:
            model.skipped = (model.skipped + 1) % len(model.blocks)
        optimizer.zero_grad()
        optimizer.scale_loss(model(x).float().square().mean()).backward()
        optimizer.step()

    return iterate


def replayed(model: Blocks, x: Tensor) -> Iterate:
    """Return an iteration whose step is a graph's replay; gradients stay in place."""
    optimizer = wrapped(model)

    def backward() -> None:
        optimizer.zero_grad(set_to_none=False)
        optimizer.scale_loss(model(x).float().square().mean()).backward()

    backward()
    graph = StepGraph(optimizer)

    def iterate() -> None:
        backward()
        graph.replay()

    return iterate


def amp(model: Blocks, x: Tensor) -> Iterate:
    """Return an iteration with torch.amp, on fp32 parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=2.0**10)

    def iterate() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return iterate


def by_peer(model: Blocks, x: Tensor, kind: Any) -> Iterate:
    """Return an iteration with another library's optimizer, on bf16 parameters."""
    optimizer = kind(model.parameters(), lr=1e-5)

    def iterate() -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return iterate


def contenders(numel: int, tensors: int, tokens: int, device: torch.device) -> Iterator[tuple[str, Iterate]]:
    """Yield each row's name and its iteration, on parameters of its own with the same values."""

    def given(dtype: torch.dtype) -> tuple[Blocks, Tensor]:
        model = Blocks(numel, tensors).to(device, dtype)
        return model, torch.randn(tokens, model.width, device=device, dtype=dtype)

    half, brain = torch.float16, torch.bfloat16
    yield AMP, amp(*given(torch.float32))
    yield "megascale, fp16", ours(*given(half))
    yield "megascale, bf16", ours(*given(brain))
    yield "megascale, bf16, 8-bit moments and remainders", ours(*given(brain), **COMPACT)
    yield "megascale, fp16, another block without gradients each time", ours(*given(half), skips=True)
    if device.type == "cuda":
        yield "megascale, fp16, replays of a StepGraph", replayed(*given(half))
    if dist.is_initialized():
        model, x = given(brain)
        for block in model.blocks:
            fully_shard(block)
        yield "megascale, bf16, FSDP2 on one rank", ours(fully_shard(model), x)
    for package, (module, name) in PEERS.items():
        if importlib.util.find_spec(package) is not None:
            kind = getattr(importlib.import_module(module), name)
            yield f"{package} {version(package)}, bf16", by_peer(*given(brain), kind)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def table(given: argparse.Namespace, tensors: int, device: torch.device) -> list[str]:
    """Return the lines of the table of one number of tensors."""
    rows = dict(contenders(given.numel, tensors, given.tokens, device))
    for iterate in rows.values():
        for _ in range(WARM_UP):
            iterate()
    taken: dict[str, list[float]] = {name: [] for name in rows}
    issued: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(given.rounds):
        for name, iterate in rows.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(given.iterations):
                iterate()
            issued[name].append((time.perf_counter() - start) * 1e3 / given.iterations)
            synchronize(device)
            taken[name].append((time.perf_counter() - start) * 1e3 / given.iterations)
    lines = [
        f"### {tensors:,} tensors",
        "",
        "| training | iteration ms | beside torch.amp | host ms |",
        "|---|---|---|---|",
    ]
    for name, times in taken.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(times, taken[AMP], strict=True))
        cell = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        lines.append(f"| {name} | {cell} | {ratio:.2f} | {statistics.median(issued[name]):.2f} |")
    return [*lines, ""]


def main() -> None:
    """Measure, print, and write the table where asked."""
    parser = base_parser(__doc__, rounds=5)
    parser.add_argument("--tensors", default="300,2000", help="separated by commas")
    parser.add_argument("--tokens", type=int, default=4096, help="rows of the activations")
    parser.add_argument("--iterations", type=int, default=10, help="of a row's turn")
    given = parser.parse_args()
    print_backend()
    device = torch.device(given.device)
    torch.set_num_threads(given.threads)
    if device.type == "cuda" and dist.is_nccl_available():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    arguments = f"--numel {given.numel} --tensors {given.tensors} --tokens {given.tokens}"
    lines = [
        f"## Iterations of training: {torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'}",
        "",
        place(device, given.threads),
        "",
        f"`python benchmarks/loop.py {arguments} --iterations {given.iterations} --rounds {given.rounds}`",
        "",
    ]
    for count in map(int, given.tensors.split(",")):
        lines += table(given, count, device)
        if given.out is not None:  # at once: what comes later may not be finished
            Path(given.out).write_text("\n".join(lines))
    print("\n".join(lines))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
