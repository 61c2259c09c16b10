"""Checkpoints that commit 9dbb0b5 wrote, and what they must hold: their format is promised to load from then on.

    git worktree add --detach /tmp/earlier 9dbb0b5
    cp tests/earlier_checkpoints.py /tmp/earlier/tests/
    cd /tmp/earlier && python -m tests.earlier_checkpoints /tmp/checkpoints_9dbb0b5.tar.xz

wrote tests/data/checkpoints_9dbb0b5.tar.xz, which holds for each case

    <folder>/step_00000005/    the checkpoint after 5 steps, one of them skipped
    <folder>/expected.pt       state dict and weights at step 5, and weights after 3 more steps

Gradients are multiples of 1/16 that depend on the step and the rank only, and nothing is clipped. So the kernels' bits
are the same on every machine.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    Lion,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    build_optimizer,
)
from megascale.checkpoint import save

ARCHIVE = Path(__file__).parent / "data" / "checkpoints_9dbb0b5.tar.xz"
SAVED, LAST = 5, 8
LAYOUTS = ("replicated", "elements", "parameters")
"""Main params and state whole on every rank, or sharded in one of two ways."""
INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adam_amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd_momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd_dampening": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.3),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
}
COMPACT, MUON = "compact", "muon"
"""AdamW with 8-bit moments and remainders in bf16; Muon and AdamW in one chain."""
OWN_ARITHMETIC = ("adagrad", "rmsprop", MUON)
"""Optimizers whose bits are those of torch's kernels, which may differ between processors."""

Optimizer = MixedPrecisionOptimizer | ChainedOptimizer


class Case(NamedTuple):
    """One checkpoint."""

    layout: str
    ranks: int
    inner: str
    dtype: torch.dtype = torch.float16

    @property
    def folder(self) -> str:
        """Return where it lies in the archive."""
        return f"{self.layout}_{self.ranks}/{self.inner}" + ("" if self.dtype == torch.float16 else "_bf16")


def _cases(layout: str, ranks: int, *inner: str) -> list[Case]:
    return [Case(layout, ranks, one, torch.bfloat16 if one == COMPACT else torch.float16) for one in inner]


CASES = [
    *_cases("replicated", 1, *INNER, COMPACT, MUON),
    Case("replicated", 1, "adamw", torch.bfloat16),
    *_cases("replicated", 2, "adamw", COMPACT, MUON),
    *_cases("elements", 1, "adamw", COMPACT),
    *_cases("elements", 2, *(one for one in INNER if one not in OWN_ARITHMETIC), COMPACT),
    Case("elements", 2, "adamw", torch.bfloat16),
    *_cases("parameters", 1, "adamw", COMPACT, MUON),
    *_cases("parameters", 2, "adamw", "sgd_momentum", "adagrad", "rmsprop", COMPACT, MUON),
]


class Weights(nn.Module):
    """Tensors of 1 to 60 elements, two param groups, a buffer and a frozen parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in {"matrix": (5, 12), "bias": (7,), "scalar": (), "cube": (2, 3, 4)}.items():
            numel = torch.Size(shape).numel()
            values = ((torch.arange(numel) * 5 + numel) % 17 - 8) / 8
            setattr(self, name, nn.Parameter(values.reshape(shape).to(dtype)))
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        self.register_buffer("counter", torch.tensor(3))

    def groups(self) -> list[dict[str, Any]]:
        """Return weights, and the rest without weight decay where the optimizer knows it."""
        named = [(name, param) for name, param in self.named_parameters() if param.requires_grad]
        return [
            {"params": [(name, param) for name, param in named if param.dim() > 1]},
            {"params": [(name, param) for name, param in named if param.dim() <= 1], "weight_decay": 0.0},
        ]

    def loss(self, step: int, rank: int) -> Tensor:
        """Return a loss whose gradients are known exactly; at step 2 one of rank 0's is inf."""
        total = torch.zeros(())
        for shift, param in enumerate(p for p in self.parameters() if p.requires_grad):
            index = torch.arange(param.numel()).reshape(param.shape)
            grad = ((index * 7 + step * 13 + rank * 3 + shift) % 31 - 15) / 16
            if step == 2 and rank == 0 and shift == 1:
                grad = grad * float("inf")
            total = total + (param.float() * grad).sum()
        return total


def build(layout: str, inner: str, dtype: torch.dtype) -> tuple[Weights, Optimizer]:
    """Return a model and its optimizer."""
    weights = Weights(dtype)
    fp16 = dtype == torch.float16
    options: dict[str, Any] = {"fp16": fp16, "bf16": not fp16, "clip_grad": 0.0}
    scaler = DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 2, 1) if fp16 else None
    if inner == MUON:
        options |= {"optimizer": "muon", "lr": 0.02, "muon_adam_lr": 0.01, "initial_loss_scale": 64.0}
        options |= {"min_loss_scale": 1.0, "loss_scale_window": 2, "hysteresis": 1}
        config = OptimizerConfig(**options, use_distributed_optimizer=layout != "replicated")
        return weights, build_optimizer(config, weights)
    if inner == COMPACT:
        options |= {"store_param_remainders": True, "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
        inner = "adamw"
    config = OptimizerConfig(**options)
    wrapped = INNER[inner](weights.groups())
    if layout == "replicated":
        return weights, MixedPrecisionOptimizer(wrapped, config, scaler)
    return weights, DistributedOptimizer(wrapped, config, scaler, modules=weights, bucket_numel=40, shard=layout)


def train(layout: str, weights: Weights, optimizer: Optimizer, first: int, last: int) -> None:
    """Take steps ``first`` to ``last - 1``. Replicas have the same gradients."""
    rank = dist.get_rank() if dist.is_initialized() and layout != "replicated" else 0
    for step in range(first, last):
        optimizer.zero_grad()
        optimizer.scale_loss(weights.loss(step, rank)).backward()
        optimizer.step()


def values(weights: Weights) -> dict[str, Tensor]:
    """Return a copy of the model's state dict."""
    return {name: value.detach().clone() for name, value in weights.state_dict().items()}


def write(ranks: int, out: Path) -> None:
    """Write every case of as many ``ranks``; all of them call it."""
    for case in [case for case in CASES if case.ranks == ranks]:
        weights, optimizer = build(case.layout, case.inner, case.dtype)
        train(case.layout, weights, optimizer, 0, SAVED)
        folder = out / case.folder
        save(folder, SAVED, weights, optimizer)
        state, at_save = optimizer.state_dict(), values(weights)
        train(case.layout, weights, optimizer, SAVED, LAST)
        later = optimizer.state_dict()
        if not dist.is_initialized() or dist.get_rank() == 0:
            expected = {"state": state, "weights": at_save, "later": later, "later_weights": values(weights)}
            torch.save(expected, folder / "expected.pt")


def unpack(folder: Path) -> Path:
    """Unpack the archive into ``folder``, which it returns."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _pack(folder: Path, out: Path) -> None:
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = path.stat().st_size
            with open(path, "rb") as stream:
                archive.addfile(entry, stream)


def main() -> None:
    """Write all cases, those of two ranks in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the archive, or with --ranks a folder")
    parser.add_argument("--ranks", type=int, help="write only the cases of as many ranks, from the processes there are")
    given = parser.parse_args()
    if given.ranks is not None:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        write(given.ranks, given.out)
        return
    with tempfile.TemporaryDirectory() as made:
        this = ["-m", "tests.earlier_checkpoints", made, "--ranks"]
        subprocess.run([sys.executable, *this, "1"], check=True)
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *this, "2"], check=True)
        _pack(Path(made), given.out)


if __name__ == "__main__":
    main()
