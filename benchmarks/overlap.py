"""How much of the gradient reduction DistributedOptimizer hides behind backward, and a timeline of it.

    python benchmarks/overlap.py --ranks 2 --trace trace.json.gz --png timeline.png --out overlap.md

Every round times, interleaved, on the same model: backward alone (in no_sync), the reduction alone, one after the
other, and both at once. Without spare cores the reduction competes with backward for them, so the ideal is not the
longer of the two but

    ideal = max(backward, reduction, processor time of both on all ranks / cores)
    hidden = (backward + reduction - both) / (backward + reduction - ideal)

where processor time counts every thread of a rank, gloo's too. The model is a chain of linear layers with fp16 (or
bf16) parameters that multiply in fp32; each layer is a bucket. The last bucket to be ready has no backward left to hide
behind, so the number of layers bounds what can be hidden.

Where every rank's backward keeps a core busy, no core is left to reduce. `--wait-ms` lets each layer's backward wait
idle besides, as a rank does whose accelerator computes: what is hidden then shows the schedule, not the cores.
"""

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from backend import print_backend
from torch import Tensor, nn

from megascale import DistributedOptimizer, DynamicGradScaler, OptimizerConfig

WARM_UP = 3
REDUCTIONS = ("megascale.reduce_bucket", "ncclDevKernel_ReduceScatter")
"""What a bucket's reduction is called in a trace: with gloo in a thread of megascale's, else on the device."""
WIDTH = 96
"""Characters of the text timeline."""


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad_output, None


class Linear(nn.Module):
    """A 16-bit weight that multiplies in fp32, as most CPUs are slow at 16-bit products."""

    def __init__(self, width: int, dtype: torch.dtype, wait: float) -> None:
        super().__init__()
        self.wait = wait
        self.weight = nn.Parameter((torch.randn(width, width) * width**-0.5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes [batch, width] to [batch, width], fp32."""
        y = F.linear(x, self.weight.float())
        return _Wait.apply(y, self.wait) if self.wait else y


@dataclass
class Measured:
    """Seconds of one phase in one round: of this rank's clock, and of all its threads' processor time."""

    wall: float
    processor: float


class Rank:
    """One rank: the model, the optimizer, and the four phases."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, arguments.dtype)
        layers = (Linear(arguments.width, dtype, arguments.wait_ms / 1e3) for _ in range(arguments.layers))
        self.model = nn.Sequential(*layers).to(device)
        half = dtype == torch.float16
        self.optimizer = DistributedOptimizer(
            torch.optim.AdamW(self.model.named_parameters(), lr=1e-4),
            OptimizerConfig(fp16=half, bf16=not half, clip_grad=1.0),
            DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 1000, 2),
            modules=self.model,
            bucket_numel=arguments.width**2,
        )
        self.batch = torch.randn(arguments.batch, arguments.width, device=device)
        self.device = device

    def phases(self) -> dict[str, Measured]:
        """Time each once."""
        measured = {}
        loss = self.loss()
        with self.optimizer.no_sync():
            measured["backward"] = self.timed(loss.backward)
        measured["reduction"] = self.timed(self.optimizer.grad_sync.finish)
        loss = self.loss()
        with self.optimizer.no_sync():
            measured["one after the other"] = self.timed(lambda: (loss.backward(), self.optimizer.grad_sync.finish()))
        loss = self.loss()
        measured["both"] = self.timed(lambda: (loss.backward(), self.optimizer.grad_sync.finish()))
        self.optimizer.step()
        return measured

    def loss(self) -> Tensor:
        """Begin a step: zero_grad and forward."""
        self.optimizer.zero_grad()
        return self.optimizer.scale_loss(self.model(self.batch).square().mean())

    def timed(self, phase: Any) -> Measured:
        """Run a phase between two barriers."""
        self.wait()
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        phase()
        self.wait()
        return Measured(time.perf_counter() - wall, time.process_time() - processor)

    def trace(self, path: Path) -> None:
        """Write a Chrome trace of backward and finish: JSON, gzipped."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        loss = self.loss()
        self.wait()
        dist.barrier()
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(activities=activities, experimental_config=every_thread) as profile:
            with torch.profiler.record_function("backward"):
                loss.backward()
            with torch.profiler.record_function("finish"):
                self.optimizer.grad_sync.finish()
            self.wait()
        self.optimizer.step()
        profile.export_chrome_trace(str(path))

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Measure, trace where asked, and leave the times of all ranks in ``folder``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    if device.type != "cpu":
        device = torch.device(device.type, rank)
        torch.accelerator.set_device_index(rank)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=arguments.ranks)
    served = Rank(arguments, device)
    rounds = [served.phases() for _ in range(WARM_UP + arguments.rounds)][WARM_UP:]
    served.trace(Path(folder) / f"trace{rank}.json.gz")
    gathered: list[Any] = [None] * arguments.ranks
    dist.all_gather_object(gathered, rounds)
    if rank == 0:
        torch.save(gathered, Path(folder) / "rounds.pt")
    dist.barrier()
    dist.destroy_process_group()


# The report


@dataclass
class Interval:
    """Something of the timeline: milliseconds from the start of backward."""

    name: str
    start: float
    stop: float


def timeline(path: Path) -> tuple[list[Interval], list[Interval]]:
    """Return the spans of backward and finish, and those of the collectives, in order."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    begin = min(event["ts"] for event in events if event["name"] == "backward")

    def interval(event: dict[str, Any]) -> Interval:
        start = (event["ts"] - begin) / 1e3
        return Interval(event["name"], start, start + event["dur"] / 1e3)

    # A GPU's trace shows record_function twice, on the host and on the device: the host's comes first.
    spans = {event["name"]: interval(event) for event in events[::-1] if event["name"] in ("backward", "finish")}
    flights = [interval(event) for event in events if event["name"].startswith(REDUCTIONS)]
    return [spans["backward"], spans["finish"]], sorted(flights, key=lambda flight: flight.start)


def text_timeline(spans: list[Interval], flights: list[Interval]) -> list[str]:
    """Draw it with characters."""
    end = max(interval.stop for interval in (*spans, *flights))

    def line(name: str, interval: Interval, mark: str) -> str:
        start, stop = (round(edge / end * WIDTH) for edge in (interval.start, interval.stop))
        bar = " " * start + mark * max(1, stop - start)
        return f"{name:<10}|{bar:<{WIDTH}}| {interval.start:6.1f} to {interval.stop:6.1f} ms"

    lines = [line(span.name, span, "#") for span in spans]
    return lines + [line(f"bucket {index}", flight, "=") for index, flight in enumerate(flights)]


def draw(spans: list[Interval], flights: list[Interval], path: Path) -> None:
    """Draw it as a PNG. Needs matplotlib, which the extra `bench` has."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.16 * len(flights) + 1.4))
    names = [span.name for span in spans] + [f"bucket {index}" for index in range(len(flights))]
    for row, interval in enumerate([*spans, *flights]):
        colour = "tab:blue" if row < len(spans) else "tab:orange"
        axes.barh(row, interval.stop - interval.start, left=interval.start, color=colour)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


@dataclass
class Phase:
    """One phase over all rounds, in milliseconds: the slowest rank's clock, and the processor time of all ranks."""

    wall: list[float]
    processor: float

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.wall)


def summary(gathered: list[list[dict[str, Measured]]]) -> dict[str, Phase]:
    """Return each phase; ``gathered`` is by rank, then by round."""
    rounds = list(zip(*gathered, strict=True))
    phases = {}
    for name in rounds[0][0]:
        wall = [max(rank[name].wall for rank in by_rank) * 1e3 for by_rank in rounds]
        processor = statistics.median(sum(rank[name].processor for rank in by_rank) * 1e3 for by_rank in rounds)
        phases[name] = Phase(wall, processor)
    return phases


def report(phases: dict[str, Phase], drawn: list[str], arguments: argparse.Namespace, command: str) -> str:
    """Return the Markdown text."""
    where = "CPU" if arguments.device == "cpu" else torch.cuda.get_device_name()
    cores = os.cpu_count() or 1
    backward, reduction, both = (phases[name].median for name in ("backward", "reduction", "both"))
    processor = phases["backward"].processor + phases["reduction"].processor
    bound = max(backward, reduction)
    # On a GPU the work is not the processor's.
    ideal = max(bound, processor / cores) if arguments.device == "cpu" else bound
    saved = backward + reduction - both
    lines = [
        f"## Reduction behind backward on {where}: {arguments.ranks} ranks",
        "",
        f"{arguments.layers} layers of {arguments.width} x {arguments.width}, {arguments.dtype}, batch "
        f"{arguments.batch} a rank, each layer's backward waits {arguments.wait_ms:g} ms; fp32 main grads, one "
        f"bucket a layer; {arguments.rounds} interleaved rounds. torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, "
        f"{arguments.threads} threads a rank.",
        "",
        f"`{command}`",
        "",
        "| phase | median ms | min | max | processor ms, all ranks |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {phase.median:.1f} | {min(phase.wall):.1f} | {max(phase.wall):.1f} | {phase.processor:.0f} |"
            for name, phase in phases.items()
        ),
        "",
        f"Ideal for these cores: max({backward:.1f}, {reduction:.1f}, {processor:.0f} / {cores}) = {ideal:.1f} ms. "
        f"Hidden: ({backward:.1f} + {reduction:.1f} - {both:.1f}) / ({backward:.1f} + {reduction:.1f} - {ideal:.1f}) = "
        f"**{saved / (backward + reduction - ideal):.2f}** of what the cores allow, {saved / reduction:.2f} of the "
        "reduction.",
        "",
        "Rank 0, one step under torch.profiler; a bucket's bar is its reduction: messages, sum and division:",
        "",
        "```text",
        *drawn,
        "```",
    ]
    return "\n".join(lines) + "\n"


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="a rank's; cores / ranks unless told")
    parser.add_argument("--wait-ms", type=float, default=0.0, help="each layer's backward also waits so long, idle")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator(check_available=True) or "cpu"))
    parser.add_argument("--trace", type=Path, help="where to leave rank 0's Chrome trace, *.json.gz")
    parser.add_argument("--png", type=Path, help="where to draw the timeline; needs matplotlib")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    print_backend()
    arguments.threads = arguments.threads or max(1, (os.cpu_count() or 1) // arguments.ranks)
    return arguments


def main() -> None:
    """Measure, print, and write what is asked for."""
    arguments = arguments_of_command()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    command = "python benchmarks/overlap.py " + " ".join(
        f"--{name.replace('_', '-')} {getattr(arguments, name)}"
        for name in ("ranks", "layers", "width", "batch", "rounds", "threads", "wait_ms", "dtype", "device")
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(arguments, folder), nprocs=arguments.ranks)
        gathered = torch.load(Path(folder) / "rounds.pt", weights_only=False)
        traced = Path(folder) / "trace0.json.gz"
        spans, flights = timeline(traced)
        if arguments.trace is not None:
            shutil.copy(traced, arguments.trace)
    text = report(summary(gathered), text_timeline(spans, flights), arguments, command)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
    if arguments.png is not None:
        draw(spans, flights, arguments.png)


if __name__ == "__main__":
    main()
