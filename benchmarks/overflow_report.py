"""Time what overflow reports cost a clean step: forward, backward and AdamW of a small GPT in fp16, clipping to norm 1.

    python benchmarks/overflow_report.py --rounds 12 --threads 2 --out benchmarks/results/overflow_report_cpu.md

Steps with and without ``report_overflows`` take turns on one model, and so does which of them is first. A cell is the
median of all steps, with minimum and maximum. "inside" is the time between the first and the last line of the hooks,
added up over a step: its share of the step shows what a difference between two noisy medians cannot.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from backend import print_backend
from torch import Tensor

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.debug import report_overflows
from megascale.debug.gradients import GradWatch, WatchedParam
from megascale.train.config import TextConfig
from megascale.train.text import Gpt, TextTask

HEAD = ("gradients", "tensors", "bytes", "without: ms", "with reports: ms", "ratio of medians", "inside: ms", "share")


class TimedWatch(GradWatch):
    """Adds up the seconds of its hooks."""

    seconds = 0.0

    def see(self, grad: Tensor, at: WatchedParam) -> None:
        """Look at a gradient."""
        start = time.perf_counter()
        super().see(grad, at)
        TimedWatch.seconds += time.perf_counter() - start


def shown(milliseconds: Sequence[float]) -> str:
    """Return the median, with minimum and maximum."""
    return f"{statistics.median(milliseconds):.1f} ({min(milliseconds):.1f} to {max(milliseconds):.1f})"


class Training:
    """A GPT and its optimizer."""

    def __init__(self, options: argparse.Namespace, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        config = TextConfig(width=options.width, layers=options.layers, context=options.context)
        self.task = TextTask(config, 0)
        self.model = Gpt(config).to(dtype)
        half = {torch.float16: {"fp16": True}, torch.bfloat16: {"bf16": True}}.get(dtype, {})
        inner = torch.optim.AdamW(self.model.named_parameters(), lr=1e-4)
        scaler = DynamicGradScaler(2.0**8) if dtype == torch.float16 else None
        self.optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(clip_grad=1.0, **half), scaler)
        self.batch = self.task.batch(0, 0, options.batch)
        self.params = list(self.model.parameters())

    def step(self) -> float:
        """Take one step. Returns its milliseconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(self.batch.inputs).float(), self.batch.targets)
        self.optimizer.scale_loss(loss).backward()
        landed = self.optimizer.step().success
        milliseconds = 1e3 * (time.perf_counter() - start)
        assert bool(landed)
        return milliseconds


def measure(options: argparse.Namespace, dtype: torch.dtype) -> str:
    """Return one row of the table."""
    training = Training(options, dtype)
    without, reporting, inside = [], [], []
    for index in range(options.rounds + 1):
        for reports in (True, False) if index % 2 else (False, True):
            reporter = report_overflows(training.optimizer, model=training.model) if reports else None
            TimedWatch.seconds = 0.0
            milliseconds = training.step()
            if reporter is not None:
                reporter.remove()
            if index:  # the first round makes tables and fills caches
                (reporting if reports else without).append(milliseconds)
                inside += [1e3 * TimedWatch.seconds] if reports else []
    ratio = statistics.median(reporting) / statistics.median(without)
    share = statistics.median(inside) / statistics.median(without)
    size = sum(param.numel() * param.element_size() for param in training.params)
    cells = (
        str(dtype).removeprefix("torch."),
        str(len(training.params)),
        f"{size:,}",
        shown(without),
        shown(reporting),
        f"{ratio:.3f}",
        shown(inside),
        f"{share:.2%}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, and write it where ``--out`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print_backend()
    torch.set_num_threads(options.threads)
    from megascale.debug import reporting

    reporting.GradWatch = TimedWatch  # type: ignore[misc]
    lines = [
        "## What overflow reports cost a clean step",
        "",
        f"torch {torch.__version__}, {sys.platform}, {options.threads} threads; {options.rounds} interleaved rounds of "
        f"a GPT of width {options.width}, {options.layers} layers, {options.batch} x {options.context} bytes.",
        "",
        f"`python benchmarks/overflow_report.py {' '.join(sys.argv[1:])}`",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
        *(measure(options, getattr(torch, name)) for name in options.dtypes.split(",")),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
