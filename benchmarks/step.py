"""Time one optimizer step: megascale and the peers that are installed, interleaved in one run on the same tensors.

    python benchmarks/step.py --numel 50_000_000 --tensors 200 --rounds 20 --threads 2 --device cpu --out table.md

The work: unscale, overflow check, clip to norm 1.0, AdamW, and the 16-bit parameters rounded from their fp32 masters.
Every contender has parameters of its own with the same values; all read the same gradients, already multiplied by the
loss scale. Every round times each contender once, in an order that rotates, so that drift of the machine and who went
before meet all of them alike. A pass over a large buffer before each step measures the machine's bandwidth and leaves
the caches cold. `--backends native,torch` adds a row for each backend of megascale. `--out FILE.md` also writes every
round to FILE.csv, and `--draw FILE.csv FILE.svg` only draws the rounds of an earlier run. `--list`
shows the contenders and how to install them.

    python benchmarks/step.py --matrix --rounds 8 --out benchmarks/results/step_matrix_cpu.md

times megascale's step under every rule, dtype of parameters and dtypes of moments instead, each beside AdamW on fp16
parameters. `--rules`, `--dtypes` and `--moments` choose; moments of two dtypes are written bfloat16/float32,
those of 8 bits int8/uint8. `--states compact` is the matrix of fp32 states, and of what is half as large or less:
remainders, 8-bit moments, and both. The rule `masters`, which it has too, is no rule but fp32 masters by hand.
"""

import argparse
import csv
import hashlib
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import svg
import torch
from backend import print_backend
from peers import matrix
from peers.contenders import BASELINE, OURS, PEERS, REFERENCE, Entry, backend_entry
from peers.report import PROBE, bandwidths_of, base_parser, bound_fractions, place, rows_of_rounds
from peers.rounds import Bandwidth, Run, run_rounds
from peers.rules import RULES
from peers.two_ranks import count_on_two_ranks
from peers.work import given_work

DTYPES = ("float16", "bfloat16", "float32")
MOMENT_DTYPES = (*DTYPES, "int8", "uint8")
COMPACT = {
    "dtypes": "float16,bfloat16",
    "rules": f"{matrix.BY_HAND},adamw,momentum,lion",
    "moments": "float32,float32+remainders,int8/uint8,int8/uint8+remainders",
}
"""What `--states compact` stands for."""


# The table


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


# The picture

NAMES = {
    "megascale": "megascale",
    "megascale, torch": "megascale (torch)",
    "masters": "fp32 copies by hand",
    "torch amp": "torch.amp, fp32 weights",
    "Megatron-Core, fused AdamW": "Megatron, fused AdamW",
    "DeepSpeed FP16_Optimizer": "DeepSpeed FP16",
}
"""Contenders as readers know them."""
COLOURS = {True: "#1f83c4", False: svg.TEXT}
"""Of bars, by whether they are megascale's."""
SHARES = 1.15
"""The axis ends at this multiple of the largest median: one slow round does not shrink all bars."""


def draw(rounds: Path) -> str:
    """Return a picture: for each dtype a panel with a bar for each contender, the fastest first, and its range.

    It names the digest of the rounds, so that a test finds a picture of others.
    """
    times: dict[str, dict[str, list[float]]] = {}
    with rounds.open(newline="", encoding="utf-8") as stream:
        for line in csv.DictReader(stream):
            times.setdefault(line["dtype"], {}).setdefault(line["contender"], []).append(float(line["ms"]))
    largest = SHARES * max(statistics.median(each) for found in times.values() for each in found.values())
    device = "CPU" if "cpu" in rounds.stem else "GPU"
    shapes: list[str] = []
    end = 0.0
    for dtype, found in times.items():
        bars = [
            svg.Bar(
                NAMES.get(who, who),
                [svg.Piece(statistics.median(each), COLOURS[who.startswith("megascale")])],
                f"{statistics.median(each):.0f}",
                (min(each), max(each)),
                who == "megascale",
            )
            for who, each in sorted(found.items(), key=lambda pair: statistics.median(pair[1]))
        ]
        drawn, end = svg.panel(f"{dtype} on a {device}: 50M parameters in 200 tensors", bars, end, largest)
        shapes += drawn
        end += 10
    shapes.append(svg.text(0, end + 8, "ms per step: median; line from the fastest to the slowest round", size=12))
    source = f"{rounds.name} {hashlib.sha256(rounds.read_bytes()).hexdigest()}"
    return svg.picture(f"Milliseconds per step of each contender on a {device}", shapes, end + 16, source)


# The command


def chosen(arguments: argparse.Namespace) -> list[Entry]:
    """Return who takes part."""
    backends = [backend_entry(name.strip()) for name in arguments.backends.split(",") if name.strip()]
    parts = [part.strip().lower() for part in arguments.only.split(",")]
    return [OURS, *backends, *(entry for entry in PEERS if any(part in entry.name.lower() for part in parts))]


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = base_parser(__doc__, rounds=20)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--dtypes", help=f"of {', '.join(DTYPES)}; of 16 bits, in the matrix all, unless told")
    parser.add_argument("--matrix", action="store_true", help="time megascale's rules, beside AdamW on fp16 parameters")
    parser.add_argument("--rules", default=",".join(RULES), help="of the matrix")
    parser.add_argument(
        "--moments", default="float32,bfloat16", help="of the matrix: dtypes, or first/second; +remainders"
    )
    parser.add_argument("--states", choices=["compact"], help="the matrix of compact states")
    parser.add_argument("--backends", default="", help="backends of megascale that get a row of their own")
    parser.add_argument("--only", default="", help="peers, by parts of their names, separated by commas")
    parser.add_argument(
        "--draw", nargs=2, type=Path, metavar=("ROUNDS", "PICTURE"), help="draw an earlier run's rounds"
    )
    parser.add_argument("--list", action="store_true", help="show the contenders, and how to install them")
    arguments = parser.parse_args()
    if not arguments.draw:
        print_backend()
    if arguments.states:
        vars(arguments).update(COMPACT, matrix=True)
    arguments.dtypes = arguments.dtypes or ",".join(DTYPES if arguments.matrix else DTYPES[:2])
    if not 0 < arguments.tensors <= arguments.numel:
        parser.error(f"--tensors {arguments.tensors} must be from 1 to --numel {arguments.numel}")
    unknown = [dtype for dtype in arguments.dtypes.split(",") if dtype not in DTYPES]
    if unknown or arguments.rounds < 1:
        parser.error(f"--dtypes are {', '.join(DTYPES)}; --rounds is at least 1")
    rules = [*RULES, matrix.BY_HAND]
    if not set(arguments.rules.split(",")) <= set(rules):
        parser.error(f"--rules are {', '.join(rules)}, not {arguments.rules}")
    dtypes = {one for state in arguments.moments.split(",") for one in state.removesuffix("+remainders").split("/")}
    if not dtypes <= {*MOMENT_DTYPES}:
        known = ", ".join(MOMENT_DTYPES)
        parser.error(
            f"--moments are {known}, or two of them with a slash between; with +remainders after them main params are "
            f"held so; not {arguments.moments}"
        )
    return arguments


def command_of(arguments: argparse.Namespace) -> str:
    """Return the command that runs this again."""
    options = [f"--{name} {getattr(arguments, name)}" for name in ("numel", "tensors", "rounds", "threads", "device")]
    for name in ("dtypes", "rules", "moments") if arguments.matrix else ("dtypes", "backends", "only"):
        options += [f'--{name} "{value}"' for value in (getattr(arguments, name),) if value]
    return f"python benchmarks/step.py {'--matrix ' * arguments.matrix}" + " ".join(options)


def write(arguments: argparse.Namespace, device: torch.device, title: str, body: Sequence[str], rounds: str) -> None:
    """Print the page, and write it and every round where asked."""
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    parts = [
        f"## {title} on {where}",
        f"{place(device, arguments.threads)}; {arguments.rounds} interleaved rounds.",
        f"`{command_of(arguments)}`",
        *body,
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
        arguments.out.with_suffix(".csv").write_text(rounds)


def main() -> None:
    """Measure, print, and write the table where asked."""
    arguments = arguments_of_command()
    entries = chosen(arguments)
    if arguments.list:
        for entry in entries:
            print(f"{entry.name}: needs {entry.needs}{', ' + entry.install if entry.install else ''}")
        return
    if arguments.draw:
        rounds, picture = arguments.draw
        picture.write_text(draw(rounds), encoding="utf-8")
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    bandwidth = Bandwidth(arguments.probe or PROBE.get(device.type, PROBE["cuda"]), device)
    if arguments.matrix:
        cells, yardstick = matrix.measure(arguments, bandwidth, device)
        body = [matrix.table(cells, yardstick, arguments.numel, arguments.tensors)]
        write(arguments, device, "The step under every rule", body, matrix.rows_of_turns(cells))
        return
    measured: dict[str, Sequence[Run]] = {}
    tables = []
    for dtype in arguments.dtypes.split(","):
        work = given_work(arguments.numel, arguments.tensors, getattr(torch, dtype), device)
        runs = run_rounds(entries, work, arguments.rounds, bandwidth, memory=True)
        count_on_two_ranks(runs, work.dtype, device)
        measured[dtype] = runs
        tables.append(table(runs, dtype, work.numel, work.tensors, device))
    write(arguments, device, "One step", [*tables, explanations(measured, device)], rows_of_rounds(measured))
    broken = [run for runs in measured.values() for run in runs if run.broken and run.entry.module == OURS.module]
    if broken:
        sys.exit(f"{broken[0].entry.name}: {broken[0].failure}")


if __name__ == "__main__":
    main()
