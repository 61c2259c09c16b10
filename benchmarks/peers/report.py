"""What all programs that time rounds take from the command line, and write."""

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from peers.rounds import Run

PROBE = {"cpu": 50_000_000, "cuda": 500_000_000}
"""Elements of the pass that measures the bandwidth: far beyond any cache."""
DISTRIBUTIONS = ("torch", "megatron-core", "deepspeed", "triton", "apex", "transformer-engine", "flashoptim")


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


def rows_of_rounds(measured: dict[str, Sequence[Run]]) -> str:
    """Return every round as CSV."""
    lines = ["dtype,contender,round,ms,bandwidth_gb_s"]
    for dtype, runs in measured.items():
        for run in runs:
            for index, (ms, bandwidth) in enumerate(zip(run.times, run.bandwidths, strict=True)):
                lines.append(f'{dtype},"{run.entry.name}",{index},{ms:.3f},{bandwidth:.2f}')
    return "\n".join(lines) + "\n"
