"""Time one optimizer step over the number of parameters, over the number of tensors, and over dtypes.

    python benchmarks/sweep.py parameters tensors dtype --threads 2 --device cpu --out benchmarks/results/sweep_cpu

Each sweep prints a table and, with `--out PREFIX`, writes PREFIX_NAME.md, every round to PREFIX_NAME.csv, and a plot to
PREFIX_NAME.png where matplotlib is installed (the extra `bench`). A point is measured as in step.py: all contenders
interleaved on the same gradients. Where a contender's rounds at one point would take longer than `--limit`, it is left
out there and at the points that follow, and the table says so. A point that memory cannot hold is left out likewise.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peers.contenders import BASELINE, MASTERS, MEGATRON_CORE, MEGATRON_FUSED, OURS, TORCH_AMP, Entry
from peers.report import PROBE, bandwidths_of, bound_fractions, place
from peers.rounds import Bandwidth, Run, run_rounds
from peers.work import given_work

PARAMETERS = "100000,1000000,10000000,100000000,1000000000"
TENSORS = "1,10,100,200,1000,10000,100000"
OTHERS = (MASTERS, TORCH_AMP, MEGATRON_CORE, MEGATRON_FUSED)
ON_MAIN_GRADS = (
    Entry("megascale, GradSync", "step_ours", "grad_sync"),
    Entry("megascale DistributedOptimizer", "step_ours", "distributed"),
)
BF16_MOMENTS = Entry("megascale, bf16 moments", "step_ours", "plain", options={"moments": (torch.bfloat16,) * 2})
BYTES_HELD = 24
"""Per parameter and contender, at the most: what has to fit."""
MEMORY_SHARE = 0.8
BOUND = 30
"""Bytes per parameter that a 16-bit step cannot do without; the plots show what the bandwidth makes of it."""


@dataclass
class Point:
    """One place of a sweep, and who was measured there. ``skipped`` says why nobody was."""

    value: int | str
    numel: int
    tensors: int
    dtype: str
    runs: Sequence[Run] = ()
    skipped: str = ""


@dataclass(frozen=True)
class Sweep:
    """One sweep: its points, contenders, and what its axis is."""

    name: str
    axis: str
    points: list[Point]
    entries: tuple[Entry, ...]


# Measurement


def memory(device: torch.device) -> int:
    """Return the bytes that are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def measure(sweep: Sweep, arguments: argparse.Namespace, device: torch.device) -> None:
    """Fill in the points of a sweep."""
    bandwidth = Bandwidth(arguments.probe or PROBE.get(device.type, PROBE["cuda"]), device)
    entries = list(sweep.entries)
    for point in sweep.points:
        installed = sum(entry.is_installed for entry in entries)
        needed, free = point.numel * BYTES_HELD * installed, memory(device) * MEMORY_SHARE
        if needed > free:
            point.skipped = f"left out: {needed / 1e9:.0f} GB for {installed} contenders, {free / 1e9:.0f} GB free"
            continue
        work = given_work(point.numel, point.tensors, getattr(torch, point.dtype), device)
        point.runs = run_rounds(entries, work, arguments.rounds, bandwidth, limit=arguments.limit)
        if sweep.name != "dtype":
            # The points that follow take longer.
            entries = [run.entry for run in point.runs if not run.failure]
        if device.type == "cuda":
            torch.cuda.empty_cache()


# Table, CSV, plot


def cells_of(run: Run, point: Point) -> list[str]:
    """Return what a row says of one contender at one point."""
    baseline = next((one for one in point.runs if one.entry.name == BASELINE), None)
    if run.failure or run.counts is None:
        return [run.failure.splitlines()[0], *[""] * 7]
    ratio = f"{baseline.median / run.median:.2f}" if baseline is not None and baseline.times else "-"
    return [
        f"{run.median:.3f}",
        f"{min(run.times):.3f}",
        f"{max(run.times):.3f}",
        ratio,
        str(run.bytes_per_parameter),
        f"{bound_fractions(run, point.numel).of_rounds:.2f}",
        str(run.counts.operations),
        str(run.counts.host_reads),
    ]


def table(sweep: Sweep, arguments: argparse.Namespace, device: torch.device) -> str:
    """Return the Markdown text of a sweep."""
    cpu = device.type == "cpu"
    counted = ["operators", "host reads"] if cpu else ["launches", "host waits"]
    heads = ["median ms", "min", "max", f"{BASELINE} / it", "bytes / parameter", "of the bandwidth", *counted]
    where = "CPU" if cpu else torch.cuda.get_device_name(device)
    lines = [
        f"## One step over {sweep.axis}, on {where}",
        "",
        f"{place(device, arguments.threads)}; {arguments.rounds} interleaved rounds.",
        "",
        f"`{command_of(arguments, sweep)}`",
        "",
        f"| {sweep.axis} | step | " + " | ".join(heads) + " |",
        "|" + "---|" * (len(heads) + 2),
    ]
    for point in sweep.points:
        value = point.value if isinstance(point.value, str) else f"{point.value:,}"
        if point.skipped:
            lines.append(f"| {value} | | {point.skipped} |" + " |" * 7)
        for run in point.runs:
            lines.append(f"| {value} | {run.label} | " + " | ".join(cells_of(run, point)) + " |")
    lines += [
        "",
        "`of the bandwidth`: bytes / parameter over the time and the bandwidth just before, the median of the rounds.",
    ]
    return "\n".join(lines) + "\n"


def rows_of_rounds(sweep: Sweep) -> str:
    """Return every round as CSV."""
    lines = ["parameters,tensors,dtype,contender,round,ms,bandwidth_gb_s"]
    for point in sweep.points:
        place_of = f"{point.numel},{point.tensors},{point.dtype}"
        for run in point.runs:
            for index, (ms, bandwidth) in enumerate(zip(run.times, run.bandwidths, strict=True)):
                lines.append(f'{place_of},"{run.entry.name}",{index},{ms:.4f},{bandwidth:.2f}')
    return "\n".join(lines) + "\n"


def places(sweep: Sweep) -> list[tuple[float, Point]]:
    """Return the points with their places on the horizontal axis."""
    if sweep.name == "dtype":
        return [(float(index), point) for index, point in enumerate(sweep.points)]
    return [(float(point.value), point) for point in sweep.points]


def draw(sweep: Sweep, device: torch.device, path: Path) -> None:
    """Draw medians, with minima and maxima, as a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5))
    by_dtype = sweep.name == "dtype"
    width = 0.8 / len(sweep.entries)
    for index, entry in enumerate(sweep.entries):
        runs = [(x, run) for x, point in places(sweep) for run in point.runs if run.entry == entry and run.times]
        if not runs:
            continue
        xs, medians = [x for x, _ in runs], [run.median for _, run in runs]
        below = [run.median - min(run.times) for _, run in runs]
        above = [max(run.times) - run.median for _, run in runs]
        if by_dtype:
            xs = [x - 0.4 + width * (index + 0.5) for x in xs]
            axes.bar(xs, medians, width, yerr=[below, above], capsize=2, label=entry.name)
        else:
            axes.errorbar(xs, medians, yerr=[below, above], capsize=2, marker="o", markersize=4, label=entry.name)
    if by_dtype:
        axes.set_xticks([x for x, _ in places(sweep)], [point.dtype for point in sweep.points])
    else:
        measured = [(x, point) for x, point in places(sweep) if bandwidths_of(point.runs)]
        bounds = [point.numel * BOUND / 1e6 / statistics.median(bandwidths_of(point.runs)) for _, point in measured]
        label = f"{BOUND} bytes a parameter at this bandwidth"
        axes.plot([x for x, _ in measured], bounds, "k--", linewidth=1, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel(sweep.axis)
    axes.set_ylabel("one step, ms: median, and minimum to maximum")
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    axes.set_title(f"Unscale, check, clip, AdamW on {where}, torch {torch.__version__}", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# The command


def over_parameters(arguments: argparse.Namespace) -> Sweep:
    """Return the sweep over sizes, at a fixed number of tensors."""
    sizes = numbers(arguments.parameters)
    points = [
        Point(size, size // arguments.tensors * arguments.tensors, arguments.tensors, "float16") for size in sizes
    ]
    return Sweep("parameters", f"parameters, fp16, in {arguments.tensors:,} tensors", points, (OURS, *OTHERS))


def over_tensors(arguments: argparse.Namespace) -> Sweep:
    """Return the sweep over numbers of tensors, at a fixed size."""
    counts = numbers(arguments.tensor_counts)
    points = [Point(count, arguments.numel // count * count, count, "float16") for count in counts]
    return Sweep("tensors", f"tensors, {arguments.numel:,} fp16 parameters", points, (OURS, *ON_MAIN_GRADS, *OTHERS))


def over_dtypes(arguments: argparse.Namespace) -> Sweep:
    """Return the sweep over dtypes of the parameters."""
    numel = arguments.numel // arguments.tensors * arguments.tensors
    points = [Point(dtype, numel, arguments.tensors, dtype) for dtype in ("float16", "bfloat16", "float32")]
    axis = f"dtype of {numel:,} parameters in {arguments.tensors:,} tensors"
    return Sweep("dtype", axis, points, (OURS, BF16_MOMENTS, *OTHERS))


SWEEPS: dict[str, Callable[[argparse.Namespace], Sweep]] = {
    "parameters": over_parameters,
    "tensors": over_tensors,
    "dtype": over_dtypes,
}


def numbers(text: str) -> list[int]:
    """Return the numbers of a list, in ascending order."""
    return sorted(int(float(number)) for number in text.split(","))


def command_of(arguments: argparse.Namespace, sweep: Sweep) -> str:
    """Return the command that runs this sweep again."""
    names = {
        "parameters": ("tensors", "parameters"),
        "tensors": ("numel", "tensor_counts"),
        "dtype": ("numel", "tensors"),
    }
    options = [*names[sweep.name], "rounds", "limit", "threads", "device"]
    return f"python benchmarks/sweep.py {sweep.name} " + " ".join(
        f"--{name.replace('_', '-')} {getattr(arguments, name)}" for name in options
    )


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", choices=[*SWEEPS])
    parser.add_argument("--numel", type=int, default=50_000_000, help="elements, where tensors or dtypes vary")
    parser.add_argument("--tensors", type=int, default=200, help="tensors, where parameters or dtypes vary")
    parser.add_argument("--parameters", default=PARAMETERS)
    parser.add_argument("--tensor-counts", default=TENSORS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a contender may take at a point")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator(check_available=True) or "cpu"))
    parser.add_argument("--probe", type=int, help="elements of the pass that measures the bandwidth")
    parser.add_argument("--out", help="write tables, rounds and plots to files whose names begin so")
    return parser.parse_args()


def write(sweep: Sweep, text: str, device: torch.device, prefix: str) -> None:
    """Write the table, the rounds and, where matplotlib is installed, the plot."""
    Path(f"{prefix}_{sweep.name}.md").write_text(text)
    Path(f"{prefix}_{sweep.name}.csv").write_text(rows_of_rounds(sweep))
    try:
        draw(sweep, device, Path(f"{prefix}_{sweep.name}.png"))
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(f"no plot of {sweep.name}: matplotlib is not installed; the rounds are in {prefix}_{sweep.name}.csv")


def main() -> None:
    """Run the sweeps that are asked for."""
    arguments = arguments_of_command()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    broken: list[Run] = []
    for name in arguments.sweeps:
        sweep = SWEEPS[name](arguments)
        measure(sweep, arguments, device)
        text = table(sweep, arguments, device)
        print(text)
        if arguments.out is not None:
            write(sweep, text, device, arguments.out)
        broken += [
            run for point in sweep.points for run in point.runs if run.broken and run.entry.module == OURS.module
        ]
    if broken:
        sys.exit(f"{broken[0].entry.name}: {broken[0].failure}")


if __name__ == "__main__":
    main()
