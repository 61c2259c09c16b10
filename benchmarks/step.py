"""Time one optimizer step: megascale and the peers that are installed, interleaved in one run on the same tensors.

    python benchmarks/step.py --numel 50_000_000 --tensors 200 --rounds 20 --threads 2 --device cpu --out table.md

The work: unscale, overflow check, clip to norm 1.0, AdamW, and the 16-bit parameters rounded from their fp32 masters.
Every contender has parameters of its own with the same values; all read the same gradients, already multiplied by the
loss scale. Every round times each contender once, in an order that rotates, so that drift of the machine and who went
before meet all of them alike. A pass over a large buffer before each step measures the machine's bandwidth and leaves
the caches cold. `--backends native,torch` adds a row for each backend of megascale. `--out FILE.md` also writes every
round to FILE.csv. `--list` shows the contenders and how to install them.
"""

import argparse
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from peers.contenders import BASELINE, OURS, PEERS, REFERENCE, Entry, backend_entry
from peers.rounds import Bandwidth, Run, count_on_two_ranks, run_rounds
from peers.work import given_work

DTYPES = ("float16", "bfloat16", "float32")
PROBE = {"cpu": 50_000_000, "cuda": 500_000_000}
"""Elements of the pass that measures the bandwidth: far beyond any cache."""
DISTRIBUTIONS = ("torch", "megatron-core", "deepspeed", "triton", "apex", "transformer-engine", "flashoptim")


# The command line


def base_parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of what all programs that time rounds take. ``rounds``: how many unless told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default=str(torch.accelerator.current_accelerator(check_available=True) or "cpu"))
    parser.add_argument("--probe", type=int, help="elements of the pass that measures the bandwidth, and cools caches")
    parser.add_argument("--out", type=Path, help="write the tables to this file too, and every round beside it as .csv")
    return parser


# The table


def bandwidths_of(runs: Sequence[Run]) -> list[float]:
    """Return GB/s of the machine before every round of every contender."""
    return [bandwidth for run in runs for bandwidth in run.bandwidths]


class BoundFractions(NamedTuple):
    """Implied bytes per second over the bandwidth of the passes just before the steps.

    A machine's memory may be twice as fast in one minute as in the next, so that each step is also compared with its
    own pass; the best step is compared with the best of as many passes.
    """

    of_medians: float
    of_rounds: float
    of_best: float


def bound_fractions(run: Run, numel: int) -> BoundFractions:
    """Compare the step with what the machine's bandwidth allows."""
    gigabytes = run.bytes_per_parameter * numel / 1e9
    rates = [gigabytes / (ms / 1e3) for ms in run.times]
    of_rounds = [rate / bandwidth for rate, bandwidth in zip(rates, run.bandwidths, strict=True)]
    return BoundFractions(
        of_medians=statistics.median(rates) / statistics.median(run.bandwidths),
        of_rounds=statistics.median(of_rounds),
        of_best=max(rates) / max(run.bandwidths),
    )


def difference(reference: Run | None, run: Run) -> str:
    """Return the largest difference of a parameter from the reference's."""
    if reference is None or not reference.sample or not run.sample:
        return "-"
    return f"{max((a - b).abs().max().item() for a, b in zip(reference.sample, run.sample, strict=True)):.1e}"


def heads(device: torch.device) -> list[str]:
    """Return the names of the columns."""
    cpu = device.type == "cpu"
    return [
        "step",
        "median ms",
        "min",
        "max",
        f"{BASELINE} / it (median)",
        "(min)",
        "bytes / parameter",
        "GB/s",
        "of the bandwidth (medians)",
        "(median of rounds)",
        "(best)",
        "operators" if cpu else "launches",
        "host reads" if cpu else "host waits",
        "collectives",
        "held, peak: bytes / parameter",
        "first step s",
        "difference",
    ]


def row(run: Run, by_name: dict[str, Run], numel: int, columns: int) -> str:
    """Return one line of the table."""
    if run.failure or run.counts is None:
        return f"| {run.label} | {run.failure.splitlines()[0]} |" + " |" * (columns - 2)
    ours = by_name[BASELINE]
    ratios = ["-", "-"]
    if ours.times:
        ratios = [f"{ours.median / run.median:.2f}", f"{min(ours.times) / min(run.times):.2f}"]
    counted = run.counts.collectives
    collectives = "?" if counted is None else ", ".join(f"{name} {n}" for name, n in sorted(counted.items())) or "none"
    cells = [
        run.label,
        f"{run.median:.1f}",
        f"{min(run.times):.1f}",
        f"{max(run.times):.1f}",
        *ratios,
        str(run.bytes_per_parameter),
        f"{run.bytes_per_parameter * numel / run.median / 1e6:.1f}",
        *(f"{fraction:.2f}" for fraction in bound_fractions(run, numel)),
        str(run.counts.operations),
        str(run.counts.host_reads),
        collectives,
        "-" if run.counts.held is None else f"{run.counts.held:.1f}, {run.counts.peak:.1f}",
        f"{run.first_step:.2f}",
        difference(by_name.get(REFERENCE), run),
    ]
    return "| " + " | ".join(cells) + " |"


def table(runs: Sequence[Run], dtype: str, numel: int, tensors: int, device: torch.device) -> str:
    """Return the Markdown of one dtype."""
    by_name = {run.entry.name: run for run in runs}
    bandwidths = bandwidths_of(runs)
    columns = heads(device)
    lines = [
        f"### {dtype}, {numel:,} parameters in {tensors:,} tensors",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *(row(run, by_name, numel, len(columns)) for run in runs),
    ]
    if bandwidths:
        what = "in-place" if device.type == "cpu" else "copy"
        lines += [
            "",
            f"{what.capitalize()} bandwidth in the same run: median {statistics.median(bandwidths):.1f} GB/s, "
            f"best {max(bandwidths):.1f}.",
        ]
    return "\n".join(lines)


def explanations(measured: dict[str, Sequence[Run]], device: torch.device) -> str:
    """Return what the columns mean, and each contender's traffic by dtype."""
    if device.type == "cpu":
        counted = (
            "`operators`: dispatched by torch, so that calls of other libraries do not count. `host reads`: values "
        )
        counted += "that Python takes from a tensor."
    else:
        counted = "`launches`: kernels, copies and fills. `host waits`: calls that let the host wait for the device."
    lines = [
        "A ratio below 1 means that megascale is faster. `bytes / parameter`: what the passes of a step have to read "
        "and write, listed below; GB/s is that over the median. `of the bandwidth`: GB/s over the bandwidth of the "
        "same run, measured by a pass before each step: the median step's over the median of its passes, the median of "
        "the rounds, and the best step's over the best of its passes. "
        f"{counted} `collectives`: of a step on two ranks; with none, ranks may disagree on a skip. "
        "`held`: parameters, gradients, masters and state before the step, `peak`: at the step's worst moment. "
        f"`difference`: the largest between a parameter and that of {REFERENCE}, after the last round.",
        "",
    ]
    by_passes: dict[tuple[str, str, str], list[str]] = {}
    for dtype, runs in measured.items():
        for run in runs:
            passes = ", ".join(f"{name} {number}" for name, number in run.traffic.items())
            by_passes.setdefault((run.entry.name, run.entry.note, passes), []).append(dtype)
    for (name, note, passes), dtypes in by_passes.items():
        if passes:
            lines.append(f"- {name}{f' ({note})' if note else ''}, {', '.join(dtypes)}: {passes}")
    return "\n".join(lines)


def rows_of_rounds(measured: dict[str, Sequence[Run]]) -> str:
    """Return every round as CSV."""
    lines = ["dtype,contender,round,ms,bandwidth_gb_s"]
    for dtype, runs in measured.items():
        for run in runs:
            for index, (ms, bandwidth) in enumerate(zip(run.times, run.bandwidths, strict=True)):
                lines.append(f'{dtype},"{run.entry.name}",{index},{ms:.3f},{bandwidth:.2f}')
    return "\n".join(lines) + "\n"


# The command


def place(device: torch.device, threads: int) -> str:
    """Return where this runs, and the versions of what is installed."""
    versions = []
    for name in DISTRIBUTIONS:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    cores = f"{platform.machine()}, {os.cpu_count()} cores, {threads} threads"
    return f"{', '.join(versions)}, Python {platform.python_version()}, {platform.system()} {cores}"


def chosen(arguments: argparse.Namespace) -> list[Entry]:
    """Return who takes part."""
    backends = [backend_entry(name.strip()) for name in arguments.backends.split(",") if name.strip()]
    parts = [part.strip().lower() for part in arguments.only.split(",")]
    return [OURS, *backends, *(entry for entry in PEERS if any(part in entry.name.lower() for part in parts))]


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = base_parser(__doc__, rounds=20)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--dtypes", default="float16,bfloat16", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--backends", default="", help="backends of megascale that get a row of their own")
    parser.add_argument("--only", default="", help="peers, by parts of their names, separated by commas")
    parser.add_argument("--list", action="store_true", help="show the contenders, and how to install them")
    arguments = parser.parse_args()
    if not 0 < arguments.tensors <= arguments.numel:
        parser.error(f"--tensors {arguments.tensors} must be from 1 to --numel {arguments.numel}")
    unknown = [dtype for dtype in arguments.dtypes.split(",") if dtype not in DTYPES]
    if unknown or arguments.rounds < 1:
        parser.error(f"--dtypes are {', '.join(DTYPES)}; --rounds is at least 1")
    return arguments


def command_of(arguments: argparse.Namespace) -> str:
    """Return the command that runs this again."""
    options = [f"--{name} {getattr(arguments, name)}" for name in ("numel", "tensors", "rounds", "threads", "device")]
    for name in ("dtypes", "backends", "only"):
        options += [f'--{name} "{value}"' for value in (getattr(arguments, name),) if value]
    return "python benchmarks/step.py " + " ".join(options)


def main() -> None:
    """Measure, print, and write the table where asked."""
    arguments = arguments_of_command()
    entries = chosen(arguments)
    if arguments.list:
        for entry in entries:
            print(f"{entry.name}: needs {entry.needs}{', ' + entry.install if entry.install else ''}")
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    bandwidth = Bandwidth(arguments.probe or PROBE.get(device.type, PROBE["cuda"]), device)
    measured: dict[str, Sequence[Run]] = {}
    tables = []
    for dtype in arguments.dtypes.split(","):
        work = given_work(arguments.numel, arguments.tensors, getattr(torch, dtype), device)
        runs = run_rounds(entries, work, arguments.rounds, bandwidth, memory=True)
        count_on_two_ranks(runs, work)
        measured[dtype] = runs
        tables.append(table(runs, dtype, work.numel, work.tensors, device))
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    parts = [
        f"## One step on {where}",
        f"{place(device, arguments.threads)}; {arguments.rounds} interleaved rounds.",
        f"`{command_of(arguments)}`",
        *tables,
        explanations(measured, device),
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
        arguments.out.with_suffix(".csv").write_text(rows_of_rounds(measured))
    broken = [run for runs in measured.values() for run in runs if run.broken and run.entry.module == OURS.module]
    if broken:
        sys.exit(f"{broken[0].entry.name}: {broken[0].failure}")


if __name__ == "__main__":
    main()
