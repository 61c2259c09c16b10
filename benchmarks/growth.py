"""Time what many tensors cost: the same parameters in few and in many tensors, interleaved in one run.

    python benchmarks/growth.py --numel 50000000 --few 200 --many 100000 --rounds 20 --threads 2 --device cpu

Unlike two points of sweep.py, which lie minutes apart, both sizes meet the machine as it is at the moment. Prints a
table and, with `--out`, writes it there and every round beside it as .csv.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peers.contenders import MASTERS, OURS, TORCH_AMP, Entry
from peers.report import PROBE, base_parser, place, rows_of_rounds
from peers.rounds import Bandwidth, Run, run_rounds
from peers.work import Stepper, Work, given_work
from sweep import ON_MAIN_GRADS

HEADS = (
    "step",
    "{few:,} tensors: median ms",
    "min",
    "{many:,} tensors: median ms",
    "min",
    "ratio of medians",
    "of minima",
    "of a round: median (middle half)",
    "{counted}",
)


@dataclass(frozen=True)
class SizedEntry(Entry):
    """A contender on parameters in a number of tensors of its own."""

    tensors: int = 1

    def make(self, work: Work) -> Stepper:
        """See :class:`Entry`."""
        return super().make(given_work(work.numel, self.tensors, work.dtype, work.device))


def sized(entry: Entry, tensors: int) -> SizedEntry:
    """Return a contender on so many tensors."""
    return SizedEntry(**{**vars(entry), "name": f"{entry.name}, {tensors:,} tensors"}, tensors=tensors)


def row(entry: Entry, few: Run, many: Run) -> list[str]:
    """Return what the table says of one contender."""
    failure = few.failure or many.failure
    if failure or few.counts is None or many.counts is None:
        return [entry.name, failure.splitlines()[0], *[""] * (len(HEADS) - 2)]
    ratios = sorted(b / a for a, b in zip(few.times, many.times, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return [
        entry.name + (f" ({few.backend})" if few.backend else ""),
        *(f"{time:.1f}" for run in (few, many) for time in (run.median, min(run.times))),
        f"{many.median / few.median:.2f}",
        f"{min(many.times) / min(few.times):.2f}",
        f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})",
        f"{few.counts.operations}, {many.counts.operations}",
    ]


def table(entries: Sequence[Entry], runs: Sequence[Run], arguments: argparse.Namespace, device: torch.device) -> str:
    """Return the Markdown text. ``runs``: of each contender the one on few tensors, then the one on many."""
    cpu = device.type == "cpu"
    counted = "operators" if cpu else "launches"
    where = "CPU" if cpu else torch.cuda.get_device_name(device)
    options = " ".join(f"--{name} {getattr(arguments, name)}" for name in ("numel", "few", "many", "rounds", "threads"))
    only = f' --only "{arguments.only}"' if arguments.only else ""
    heads = [head.format(few=arguments.few, many=arguments.many, counted=counted) for head in HEADS]
    lines = [
        f"## {arguments.numel:,} fp16 parameters in few and in many tensors, on {where}",
        "",
        f"{place(device, arguments.threads)}; {arguments.rounds} interleaved rounds.",
        "",
        f"`python benchmarks/growth.py {options} --device {arguments.device}{only}`",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    for index, entry in enumerate(entries):
        lines.append("| " + " | ".join(row(entry, *runs[2 * index : 2 * index + 2])) + " |")
    return "\n".join(lines) + "\n"


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = base_parser(__doc__, rounds=20)
    parser.add_argument("--few", type=int, default=200, help="tensors")
    parser.add_argument("--many", type=int, default=100_000, help="tensors")
    parser.add_argument("--only", default="", help="contenders, by parts of their names, separated by commas")
    arguments = parser.parse_args()
    if not 0 < arguments.few <= arguments.many <= arguments.numel or arguments.rounds < 1:
        parser.error("0 < --few <= --many <= --numel must hold, and --rounds be at least 1")
    return arguments


def main() -> None:
    """Measure, print, and write the table where asked."""
    arguments = arguments_of_command()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    wanted = arguments.only.split(",")
    entries = [e for e in (OURS, *ON_MAIN_GRADS, TORCH_AMP, MASTERS) if any(part in e.name for part in wanted)]
    both = [sized(entry, count) for entry in entries for count in (arguments.few, arguments.many)]
    bandwidth = Bandwidth(arguments.probe or PROBE.get(device.type, PROBE["cuda"]), device)
    work = Work(arguments.numel, arguments.few, torch.float16, device, [])  # each entry makes its own gradients
    runs = run_rounds(both, work, arguments.rounds, bandwidth)
    text = table(entries, runs, arguments, device)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
        arguments.out.with_suffix(".csv").write_text(rows_of_rounds({"float16": runs}))
    broken = [run for run in runs if run.broken and run.entry.module == OURS.module]
    if broken:
        sys.exit(f"{broken[0].entry.name}: {broken[0].failure}")


if __name__ == "__main__":
    main()
