"""Time one optimizer step against what users write by hand, interleaved in one run on the same tensors.

    python benchmarks/step.py --numel 50_000_000 --tensors 200 --threads 2

Contenders: unscale, overflow check, clip to norm 1.0, AdamW, and the 16-bit parameters rounded from their fp32 masters.
`megascale` and `masters` train 16-bit parameters; `torch amp` trains fp32 parameters, with fp32 gradients, and has no
masters. Every round times each contender once, in turn, so that drift of the machine meets all of them alike. Prints
milliseconds (median, min, max), the ratio of medians and of minima to `megascale`, and host reads per step.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig

SCALE = 2.0**16
CLIP = 1.0
LR = 1e-4


class HostReads(TorchDispatchMode):
    """Counts values that go to the host."""

    count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count, then run."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def parameters(numel: int, tensors: int, dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Return ``tensors`` equal parameters of ``numel`` elements in all, with gradients scaled by SCALE."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for _ in range(tensors):
        value = torch.randn(numel // tensors, generator=generator, device=device)
        param = nn.Parameter((value * 0.02).to(dtype))
        param.grad = (value.flip(0) * 1e-4 * SCALE).to(dtype)
        made.append(param)
    return made


def megascale_step(numel: int, tensors: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a step of MixedPrecisionOptimizer."""
    params = parameters(numel, tensors, dtype, device)
    config = OptimizerConfig(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, clip_grad=CLIP)
    scaler = DynamicGradScaler(SCALE, 1.0, 2.0, 0.5, 1000, 2)
    return MixedPrecisionOptimizer(torch.optim.AdamW(params, lr=LR), config, scaler).step


def masters_step(numel: int, tensors: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a step as written by hand: fp32 masters, torch's fused AdamW, one host read of the overflow flag."""
    params: list[Tensor] = [*parameters(numel, tensors, dtype, device)]
    grads = [param.grad for param in params if param.grad is not None]
    masters = [param.detach().float().requires_grad_() for param in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    master_grads = [master.grad for master in masters if master.grad is not None]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    inv_scale, found_inf = torch.full((), 1 / SCALE, device=device), torch.zeros((), device=device)

    @torch.no_grad()
    def step() -> None:
        found_inf.zero_()
        torch._foreach_copy_(master_grads, grads)
        torch._amp_foreach_non_finite_check_and_unscale_(master_grads, found_inf, inv_scale)
        if found_inf.item():
            return
        torch.nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        torch._foreach_copy_(params, masters)

    return step


def amp_step(numel: int, tensors: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return torch.amp.GradScaler's step on fp32 parameters, with unscale_, clip and fused AdamW.

    It unscales in place. With a scale of 1, which costs the same, the gradients stay what they are from round to round.
    """
    params = parameters(numel, tensors, torch.float32, device)
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
    scaler.scale(torch.ones((), device=device))

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, CLIP, foreach=True)
        scaler.step(optimizer)
        scaler.update()

    return step


CONTENDERS = {"megascale": megascale_step, "masters": masters_step, "torch amp": amp_step}


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(steps: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return milliseconds of each contender's step, one per round."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for warm_up in (True, True, *[False] * rounds):
        for name, step in steps.items():
            wait(device)
            start = time.perf_counter()
            step()
            wait(device)
            if not warm_up:
                taken[name].append((time.perf_counter() - start) * 1e3)
    return taken


def bandwidth(numel: int, device: torch.device, rounds: int) -> float:
    """Return the best in-place bandwidth of ``x += 1`` on fp32, in GB/s: what a pass over memory can reach here."""
    x = torch.zeros(numel, device=device)
    best = 0.0
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        x.add_(1)
        wait(device)
        best = max(best, 8 * numel / (time.perf_counter() - start) / 1e9)
    return best


def report(arguments: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> str:
    """Measure one dtype and return its Markdown table."""
    steps = {name: make(arguments.numel, arguments.tensors, dtype, device) for name, make in CONTENDERS.items()}
    reads = {}
    for name, step in steps.items():
        step()
        with HostReads() as counter:
            step()
        reads[name] = counter.count
    taken = measure(steps, arguments.rounds, device)
    ours, fastest = statistics.median(taken["megascale"]), min(taken["megascale"])
    title = f"{str(dtype).removeprefix('torch.')}, {arguments.numel:,} parameters in {arguments.tensors} tensors"
    lines = [
        f"### {title}",
        "",
        "| step | median ms | min | max | megascale / it (median) | (min) | host reads |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, times in taken.items():
        median = statistics.median(times)
        lines.append(
            f"| {name} | {median:.1f} | {min(times):.1f} | {max(times):.1f} "
            f"| {ours / median:.2f} | {fastest / min(times):.2f} | {reads[name]} |"
        )
    moved = 30 * arguments.numel / (fastest / 1e3) / 1e9
    lines += ["", f"megascale at 30 bytes a parameter: {moved:.1f} GB/s in its fastest step."]
    return "\n".join(lines)


def main() -> None:
    """Parse arguments, measure, print, and write the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator() or "cpu"))
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    parts = [
        f"## One step on {where}",
        f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.threads} threads, "
        f"{arguments.rounds} interleaved rounds; in-place bandwidth {bandwidth(arguments.numel, device, 10):.1f} GB/s.",
        f"`python benchmarks/step.py --numel {arguments.numel} --tensors {arguments.tensors} "
        f"--rounds {arguments.rounds} --threads {arguments.threads} --device {device}`",
        *(report(arguments, dtype, device) for dtype in (torch.float16, torch.bfloat16)),
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
