"""Trains with compact states beside fp32 states: the same tasks, initial weights, batches and learning rates.

The tasks are those of ``python -m megascale.train``, made small: a GPT on bytes, and a U-Net that labels the pixels of
handwritten digits. Parameters are bf16 or fp16. AdamW's learning rate falls to zero along a cosine, so that updates
become smaller than the distance to the next 16-bit number. Runs of a seed differ only in what is kept between steps:

- fp32 states: main params and moments in fp32
- remainders: remainders of 16 bits in place of main params
- 8-bit moments: int8 and uint8 in place of fp32
- both
- no remainders: fp32 states, but after each step main params are set to the 16-bit weights
- torch's AdamW alone: fused, on the 16-bit weights; its moments have 16 bits, too
- 1 % off: fp32 states with initial weights that differ by 1 %: what chance alone makes of a run

Held-out loss and accuracy are means over the last five evaluations, all in the last tenth of the steps.

A bf16 remainder holds all main params but ties, which lie halfway between two bf16 numbers and move by one fp32 ulp.
One more run of fp32 states moves its ties, too: its weights should have the bits of those with remainders.

Prints a table, and writes it where ``--out`` says. Takes 15 minutes on one core. With a learning rate ten times as
large, the U-Net goes another way after the least change:

    python benchmarks/certificate.py --out benchmarks/results/certificate.md
    python benchmarks/certificate.py --tasks digits --set optimizer.lr=0.01 --out fast.md
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from backend import print_backend
from torch import Tensor

from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.train.build import DTYPES, build_task, lr_factor
from megascale.train.config import TrainConfig, load_config
from megascale.train.tasks import Batch, Task

SETTINGS = {
    "text": "config=text steps=1200 batch_size=8 optimizer.lr=0.003 "
    "text.width=32 text.layers=2 text.context=32 text.heldout_windows=256",
    "digits": "config=digits steps=1000 batch_size=4 optimizer.name=adamw optimizer.lr=0.001 "
    "digits.size=64 digits.grid=4 digits.patch=2 digits.width=8 digits.depth=1",
}
PRECISIONS, SEEDS = ("bf16", "fp16"), (0, 1, 2)
BETA2 = 0.999
SCALE = 1024.0
"""The loss scale in fp16: constant, so that no run skips a step."""
EVALUATIONS = 5


class Run:
    """fp32 states: one model, its optimizer, and its evaluations."""

    name = "fp32 states"
    states: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: TrainConfig, task: Task) -> None:
        torch.manual_seed(config.seed)
        self.task, self.dtype = task, DTYPES[config.precision]
        self.model = task.model().to(self.dtype)
        self.evaluations: list[tuple[float, float]] = []
        self.skipped = torch.tensor(0)
        options = config.optimizer
        self.inner = torch.optim.AdamW(
            self.model.named_parameters(), betas=(options.beta1, BETA2), weight_decay=options.weight_decay, fused=True
        )
        self.wrap(self.dtype is torch.float16)

    def wrap(self, half: bool) -> None:
        """Wrap the inner optimizer, without clipping."""
        config = OptimizerConfig(fp16=half, bf16=not half, **self.states)
        self.optimizer = MixedPrecisionOptimizer(self.inner, config, ConstantGradScaler(SCALE) if half else None)

    def train(self, batch: Batch, rate: float) -> None:
        """Take one step."""
        for group in self.inner.param_groups:
            group["lr"] = rate
        loss, _ = self._loss(batch)
        self.inner.zero_grad()
        self.update(loss)

    def update(self, loss: Tensor) -> None:
        """Update the weights by the gradients of ``loss``."""
        self.optimizer.scale_loss(loss).backward()
        self.skipped += ~self.optimizer.step().success

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> None:
        """Keep the loss and accuracy on ``batch``."""
        loss, logits = self._loss(batch)
        right = logits.max(1).indices == batch.targets
        self.evaluations.append((loss.item(), right.double().mean().item()))

    def result(self) -> tuple[float, float]:
        """Return the means of loss and accuracy."""
        if self.skipped:
            raise RuntimeError(f"SCALE={SCALE}: {self.name} skipped {self.skipped.item()} steps; lower it")
        losses, accuracies = zip(*self.evaluations, strict=True)
        return sum(losses) / len(losses), sum(accuracies) / len(accuracies)

    def differing(self, other: "Run") -> int:
        """Return how many elements of the weights differ from ``other``'s."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return sum(int((mine.view(torch.int16) != theirs.view(torch.int16)).sum()) for mine, theirs in pairs)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs = batch.inputs.to(self.dtype) if batch.inputs.is_floating_point() else batch.inputs
        logits: Tensor = self.model(inputs).float()
        return self.task.loss(logits, batch.targets), logits


class Remainders(Run):
    """Remainders in place of main params."""

    name = "remainders"
    states: ClassVar[dict[str, Any]] = {"store_param_remainders": True}


class Moments(Run):
    """Moments of 8 bits."""

    name = "8-bit moments"
    states: ClassVar[dict[str, Any]] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}


class Both(Run):
    """Remainders, and moments of 8 bits."""

    name = "both"
    states: ClassVar[dict[str, Any]] = Remainders.states | Moments.states


class NoRemainders(Run):
    """What rounding takes away is lost after each step."""

    name = "no remainders"

    def update(self, loss: Tensor) -> None:
        """Forget what the 16-bit weights do not hold."""
        super().update(loss)
        self.optimizer.reload_model_params()


class TorchAlone(Run):
    """torch's fused AdamW on the 16-bit weights."""

    name = "torch's AdamW alone"

    def wrap(self, half: bool) -> None:
        """Let the fused update divide by the loss scale."""
        self.scale = SCALE if half else 1.0
        self.inner.grad_scale, self.inner.found_inf = torch.tensor(self.scale), torch.tensor(0.0)  # type: ignore[attr-defined]

    def update(self, loss: Tensor) -> None:
        """Update without a wrapper."""
        (loss * self.scale).backward()
        self.inner.step()


class TiesMoved(Run):
    """fp32 states that lose at ties what bf16 remainders lose."""

    name = "fp32 states, ties moved"

    @torch.no_grad()
    def update(self, loss: Tensor) -> None:
        """Move main params halfway above an even bf16 number by one ulp towards 0."""
        with torch.enable_grad():
            super().update(loss)
        for _, main in self.optimizer.main_params():
            bits = main.view(torch.int32)
            bits -= ((bits & 0x1FFFF) == 0x08000).int()


class OnePercentOff(Run):
    """fp32 states of weights that begin a little off."""

    name = "1 % off"

    @torch.no_grad()
    def wrap(self, half: bool) -> None:
        """Change the weights first."""
        generator = torch.Generator().manual_seed(0)
        for param in self.model.parameters():
            param *= 1 + 0.01 * torch.randn(param.shape, generator=generator)
        super().wrap(half)


ROWS = (Run, Remainders, Moments, Both, NoRemainders, TorchAlone, OnePercentOff)


def train(config: TrainConfig) -> dict[str, Run]:
    """Train one model with each kind of states, side by side on the same batches."""
    task = build_task(config)
    heldout = task.heldout(0, task.num_heldout)
    kinds = [*ROWS, TiesMoved] if config.precision == "bf16" else ROWS
    runs = [kind(config, task) for kind in kinds]
    every = max(1, config.steps // (10 * EVALUATIONS))
    for step in range(config.steps):
        batch = task.batch(step, 0, config.batch_size)
        rate = config.optimizer.lr * lr_factor(config.optimizer, step, config.steps)
        left = config.steps - 1 - step
        for run in runs:
            run.train(batch, rate)
            if left % every == 0 and left < every * EVALUATIONS:
                run.evaluate(heldout)
    return {run.name: run for run in runs}


def losses(task: str, precision: str, seeds: list[dict[str, Run]]) -> Iterator[str]:
    """Yield rows: losses, the largest distance from fp32 states of the same seed, accuracies."""
    plain = [runs[Run.name].result()[0] for runs in seeds]
    for kind in ROWS:
        found = [runs[kind.name].result() for runs in seeds]
        far = max(abs(loss - same) for (loss, _), same in zip(found, plain, strict=True))
        distance = f"{max(plain) - min(plain):.4f}, spread of seeds" if kind is Run else f"{far:.4f}"
        each = " | ".join(f"{loss:.4f}" for loss, _ in found)
        accuracies = ", ".join(f"{accuracy:.4f}" for _, accuracy in found)
        yield f"| {task} | {precision} | {kind.name} | {each} | {distance} | {accuracies} |"


def bits(task: str, precision: str, seeds: list[dict[str, Run]]) -> str:
    """Return a row: how many weights of the run with remainders differ from those of fp32 states."""
    numel = sum(param.numel() for param in seeds[0][Run.name].model.parameters())
    cells = []
    for other in (Run.name, TiesMoved.name):
        counts = [f"{runs[Remainders.name].differing(runs[other]):,}" for runs in seeds if other in runs]
        cells.append("; ".join(counts))
    return f"| {task} | {precision} | {numel:,} | {cells[0]} | {cells[1]} |"


def table(found: dict[tuple[str, str], list[dict[str, Run]]], seeds: list[int]) -> str:
    """Return two Markdown tables."""
    each = " | ".join(f"loss, seed {seed}" for seed in seeds)
    lines = [f"| task | weights | states | {each} | largest distance from fp32 states | accuracies |"]
    lines.append("|---" * (5 + len(seeds)) + "|")
    for (task, precision), runs in found.items():
        lines += losses(task, precision, runs)
    lines += ["", "Weights of the runs with remainders that differ in the end, for each seed:", ""]
    lines += ["| task | dtype | weights | from fp32 states | from fp32 states, ties moved |", "|---|---|---|---|---|"]
    lines += [bits(task, precision, runs) for (task, precision), runs in found.items()]
    return "\n".join(lines)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="options of the training program")
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args()
    print_backend()
    torch.set_num_threads(1)
    found = {}
    for task in given.tasks:
        for precision in given.precisions:
            options = [*SETTINGS[task].split(), f"precision={precision}", *given.set]
            configs = [load_config([*options, f"seed={seed}"]) for seed in given.seeds]
            found[task, precision] = [train(config) for config in configs]
            print("\n".join(losses(task, precision, found[task, precision])), flush=True)
    text = table(found, given.seeds)
    print(f"\n{text}")
    if given.out is not None:
        given.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
