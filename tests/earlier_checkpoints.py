"""Checkpoints that an earlier commit wrote, and what they must hold.

    git worktree add --detach /tmp/earlier 8ecf6e0
    PYTHONPATH=/tmp/earlier python -m tests.earlier_checkpoints tests/data/checkpoints_8ecf6e0

wrote tests/data/checkpoints_8ecf6e0. For each optimizer, replicated on one rank and sharded on two:

    <kind>/<inner>/step_00000005/    the checkpoint after 5 steps, one of them skipped
    <kind>/<inner>/expected.pt       state dict and weights at step 5, and weights after 3 more steps

Gradients are multiples of 1/16 that depend on the step and the rank only, and nothing is clipped. So the kernels' bits
are the same on every machine.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale import DistributedOptimizer, DynamicGradScaler, Lion, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import save

DATA = Path(__file__).parent / "data" / "checkpoints_8ecf6e0"
SAVED, LAST = 5, 8
KINDS = ("replicated", "sharded")
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
OWN_STEP = ("adagrad", "rmsprop")
"""Optimizers that run their own step: their bits are torch's, which may differ between processors."""


class Case(NamedTuple):
    """One checkpoint."""

    kind: str
    inner: str
    dtype: torch.dtype

    @property
    def folder(self) -> str:
        """Return where it lies below DATA."""
        return f"{self.kind}/{self.inner}" + ("" if self.dtype == torch.float16 else "_bf16")


# Each optimizer in fp16, one in bf16. That commit could not shard Adagrad's state.
CASES = [
    Case(kind, inner, dtype)
    for kind in KINDS
    for inner, dtype in [*((inner, torch.float16) for inner in INNER), ("adamw", torch.bfloat16)]
    if (kind, inner) != ("sharded", "adagrad")
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


def build(kind: str, inner: str, dtype: torch.dtype) -> tuple[Weights, MixedPrecisionOptimizer]:
    """Return a model and its optimizer, ``replicated`` or ``sharded``."""
    weights = Weights(dtype)
    fp16 = dtype == torch.float16
    config = OptimizerConfig(fp16=fp16, bf16=not fp16, clip_grad=0.0)
    scaler = DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 2, 1) if fp16 else None
    wrapped = INNER[inner](weights.groups())
    if kind == "sharded":
        return weights, DistributedOptimizer(wrapped, config, scaler, modules=weights, bucket_numel=40)
    return weights, MixedPrecisionOptimizer(wrapped, config, scaler)


def train(weights: Weights, optimizer: MixedPrecisionOptimizer, first: int, last: int) -> None:
    """Take steps ``first`` to ``last - 1``."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, last):
        optimizer.zero_grad()
        optimizer.scale_loss(weights.loss(step, rank)).backward()
        optimizer.step()


def values(weights: Weights) -> dict[str, Tensor]:
    """Return a copy of the model's state dict."""
    return {name: value.detach().clone() for name, value in weights.state_dict().items()}


def write(kind: str, out: Path) -> None:
    """Write every case of ``kind``; all ranks call it."""
    for case in [case for case in CASES if case.kind == kind]:
        weights, optimizer = build(kind, case.inner, case.dtype)
        train(weights, optimizer, 0, SAVED)
        folder = out / case.folder
        save(folder, SAVED, weights, optimizer)
        state, at_save = optimizer.state_dict(), values(weights)
        train(weights, optimizer, SAVED, LAST)
        later = optimizer.state_dict()
        if not dist.is_initialized() or dist.get_rank() == 0:
            expected = {"state": state, "weights": at_save, "later": later, "later_weights": values(weights)}
            torch.save(expected, folder / "expected.pt")


def main() -> None:
    """Write both kinds; ``sharded`` in two processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=KINDS, help="write this kind only, from the processes that are there")
    given = parser.parse_args()
    if given.kind is not None:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        write(given.kind, given.out)
        return
    this = ["-m", "tests.earlier_checkpoints", str(given.out), "--kind"]
    subprocess.run([sys.executable, *this, "replicated"], check=True)
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *this, "sharded"], check=True)


if __name__ == "__main__":
    main()
