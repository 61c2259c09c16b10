"""Time the end of an iteration under megascale.amp against torch.amp: fp32 parameters, torch's fused AdamW.

    python benchmarks/amp.py --numel 50_000_000 --tensors 200 --rounds 24 --threads 2 --device cpu \
        --out benchmarks/results/amp_cpu.md

Without clipping: ``scaler.step(optimizer); scaler.update()`` with torch's GradScaler and with ours. With clipping:
torch's ``unscale_``, ``clip_grad_norm_``, ``step``, ``update`` against the same calls on our scaler, and against one
call of ``optimizer_step``. Gradients are given, so no forward or backward is timed. All contenders are interleaved in
one run, as in step.py, on the same parameters, gradients and moments: where these lie in memory would move the times.
A ratio is taken within each round: what slows the machine slows both. ``--out FILE.md`` also writes every round to
FILE.csv.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from backend import print_backend
from peers.contenders import Entry
from peers.report import PROBE, bandwidths_of, base_parser, bound_fractions, place, rows_of_rounds
from peers.rounds import Bandwidth, Run, run_rounds
from peers.step_amp import Trained
from peers.work import Work, given_work
from torch import Tensor

LITTLE = (4096, 4)
"""Elements and tensors on which every contender takes STEPS of its own, to see in what they differ."""
STEPS = 5

TORCH = Entry("torch: step, update", "step_amp", "torch_plain")
TORCH_CLIPPED = Entry("torch: unscale_, clip_grad_norm_, step, update", "step_amp", "torch_clipped")
OURS = Entry("megascale: step, update", "step_amp", "plain")
OURS_CLIPPED = Entry("megascale: unscale_, clip_grad_norm_, step, update", "step_amp", "clipped")
HELPED = Entry("megascale: optimizer_step(max_gradient_norm=1)", "step_amp", "helped")


class Rival(NamedTuple):
    """Against whom a contender is compared, and the ratio of times that is asked for."""

    entry: Entry
    target: float


RIVALS = {
    OURS.name: Rival(TORCH, 1.0),
    OURS_CLIPPED.name: Rival(TORCH_CLIPPED, 1.0),
    HELPED.name: Rival(TORCH_CLIPPED, 0.7),
}
ENTRIES = (TORCH, OURS, TORCH_CLIPPED, OURS_CLIPPED, HELPED)
HEADS = (
    "end of an iteration",
    "median ms",
    "min",
    "max",
    "of torch's (median of rounds)",
    "(middle half)",
    "(medians)",
    "asked for",
    "bytes / parameter",
    "of the bandwidth",
    "operators",
    "host reads",
    "difference",
)


def on_trained(entry: Entry, work: Work) -> Entry:
    """Return the contender on what the work trains, which others may share."""
    return replace(entry, options={"on": work.options["on"]})


def trained_work(numel: int, tensors: int, device: torch.device) -> Work:
    """Return work with parameters, gradients and an optimizer."""
    work = given_work(numel, tensors, torch.float32, device)
    return replace(work, options={"on": Trained(work)})


def parameters_after(entry: Entry, device: torch.device) -> list[Tensor]:
    """Return little parameters of the contender's own after a few steps."""
    work = trained_work(*LITTLE, device)
    stepper = on_trained(entry, work).make(work)
    for _ in range(STEPS):
        stepper.prepare()
        stepper.step()
    return stepper.parameters()


def difference(entry: Entry, rival: Entry, device: torch.device) -> str:
    """Return the largest difference of a parameter, after steps of each on its own."""
    pairs = zip(parameters_after(entry, device), parameters_after(rival, device), strict=True)
    return f"{max((a - b).abs().max().item() for a, b in pairs):.1e}"


def ratio_cells(run: Run, rival: Run, target: float) -> list[str]:
    """Return the ratio of each round, of the medians, and what was asked for."""
    ratios = sorted(mine / other for mine, other in zip(run.times, rival.times, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return [
        f"{statistics.median(ratios):.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{run.median / rival.median:.2f}",
        f"at most {target:.1f}",
    ]


def row(run: Run, by_name: dict[str, Run], work: Work) -> str:
    """Return one line of the table."""
    if run.failure or run.counts is None:
        return f"| {run.entry.name} | {run.failure.splitlines()[0]} |" + " |" * (len(HEADS) - 2)
    rival = RIVALS.get(run.entry.name)
    against = by_name[(rival.entry if rival else run.entry).name]
    compared = ratio_cells(run, against, rival.target) if rival and not against.failure else ["-"] * 4
    cells = [
        run.entry.name,
        f"{run.median:.1f}",
        f"{min(run.times):.1f}",
        f"{max(run.times):.1f}",
        *compared,
        str(run.bytes_per_parameter),
        f"{bound_fractions(run, work.numel).of_rounds:.2f}",
        str(run.counts.operations),
        str(run.counts.host_reads),
        difference(run.entry, rival.entry, work.device) if rival else "-",
    ]
    return "| " + " | ".join(cells) + " |"


def report(runs: Sequence[Run], arguments: argparse.Namespace, work: Work) -> str:
    """Return the page: where, with what, the table, and what its columns mean."""
    by_name = {run.entry.name: run for run in runs}
    names = ("numel", "tensors", "rounds", "threads", "device")
    command = " ".join(f"--{name} {getattr(arguments, name)}" for name in names)
    where = "CPU" if work.device.type == "cpu" else torch.cuda.get_device_name(work.device)
    bandwidths = bandwidths_of(runs) or [float("nan")]
    lines = [
        f"## megascale.amp against torch.amp on {where}",
        "",
        f"{place(work.device, arguments.threads)}; {arguments.rounds} interleaved rounds.",
        "",
        f"`python benchmarks/amp.py {command}`",
        "",
        f"### fp32, {work.numel:,} parameters in {arguments.tensors:,} tensors, torch's fused AdamW",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|" + "---|" * len(HEADS),
        *(row(run, by_name, work) for run in runs),
        "",
        f"Bandwidth in the same run: median {statistics.median(bandwidths):.1f} GB/s, best {max(bandwidths):.1f}.",
        "",
        "A ratio below 1 means that megascale is faster. `of torch's (median of rounds)`: each round's time over that "
        "of torch's row with the same work in the same round; `(middle half)`: the quartiles of those; `(medians)`: "
        "the median times' ratio. `bytes / parameter`: what the passes have to read and write, listed below; `of the "
        "bandwidth`: that over the time and the bandwidth just before, the median of the rounds. "
        f"`difference`: the largest between a parameter and that of torch's row, after {STEPS} steps of each alone.",
        "",
    ]
    for run in runs:
        lines.append(f"- {run.entry.name}: " + ", ".join(f"{name} {number}" for name, number in run.traffic.items()))
    return "\n".join(lines) + "\n"


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = base_parser(__doc__, rounds=24)
    parser.add_argument("--tensors", type=int, default=200)
    arguments = parser.parse_args()
    print_backend()
    if not 0 < arguments.tensors <= arguments.numel or arguments.rounds < 1:
        parser.error(f"--tensors {arguments.tensors} must be from 1 to --numel {arguments.numel}; --rounds at least 1")
    return arguments


def main() -> None:
    """Measure, print, and write the table where asked."""
    arguments = arguments_of_command()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    bandwidth = Bandwidth(arguments.probe or PROBE.get(device.type, PROBE["cuda"]), device)
    work = trained_work(arguments.numel, arguments.tensors, device)
    runs = run_rounds([on_trained(entry, work) for entry in ENTRIES], work, arguments.rounds, bandwidth)
    text = report(runs, arguments, work)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
        arguments.out.with_suffix(".csv").write_text(rows_of_rounds({"float32": runs}))
    broken = [run for run in runs if run.broken]
    if broken:
        sys.exit(f"{broken[0].entry.name}: {broken[0].failure}")


if __name__ == "__main__":
    main()
