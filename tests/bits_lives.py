"""Twelve lives of fifty steps, and the hashes of all that they leave: tests/data/bits.json has those of commit 937c72b.

    python -m tests.bits_lives                      # say which life has other bits, from which step on, and in what
    python -m tests.bits_lives --backend native     # on another backend; "reference" is the default
    python -m tests.bits_lives --write REASON       # bits were to change: write them, and the reason into "changed"

To run them on an older commit, copy this file and tests/cells.py into its checkout: they use public names only.

Hashes are of the model params, the main params, the optimizer's state with its step counts, the loss scale with its
trackers, and what the steps returned: success and norm. They hold on every CPU and build of torch, because nothing
depends on an order of additions, on a fused multiplication or on a product of matrices:

- Gradients and first weights are given: multiples of 2**-6, made of integer arithmetic. What micro-batches and ranks
  add up to, and each sum of squares, is exact in its dtype, in any order.
- The reference backend rounds after each operation. fp64 powers and roots, the last bits of which differ between C
  libraries, are rounded to fp32 before they are used.
- Muon's momentum is a number times a signed permutation (four elements of one magnitude, each alone in its row and
  column), so that a product of matrices has one summand. Its coefficients take 1/2 to 1 and 1 to 1/2: every number of
  the iterations is exact, in bf16 too. Its momentum of 1/2 halves exact sums.
- torch's own SGD, in the life of ``megascale.amp``, has powers of two for options: its products are exact.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from megascale import (
    ChainedOptimizer,
    DistributedOptimizer,
    DynamicGradScaler,
    Lion,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    amp,
)
from megascale.grad_sync import GradSync
from tests.cells import SHAPES, SHAPES_OF_GROUPS, Given
from tests.meshes import mesh_of
from tests.pool import RankPool

FILE = Path(__file__).parent / "data" / "bits.json"
STEPS, EVERY = 50, 10
OVERFLOWS = (4, 5, 23, 41)
"""Steps in which a gradient has an inf, on the last rank."""
UNIT = 2.0**-6

MATRICES = ((6, 8), (8, 4), (4, 12))
"""What Muon updates; the parameters of SHAPES beside them are AdamW's."""

Digests = dict[str, dict[str, str]]
"""By the number of steps taken, by what was hashed."""

CODES = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
HALVES = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.bfloat16}
REMAINDERS = {"store_param_remainders": True}

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=2e-3, amsgrad=True, maximize=True),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, dampening=0.3),
    "torch's own sgd": lambda groups: torch.optim.SGD(groups, lr=2.0**-6, momentum=0.5, weight_decay=2.0**-5),
    "lion": lambda groups: Lion(groups, lr=1e-3, weight_decay=0.1),
    "muon": lambda groups: torch.optim.Muon(
        groups, lr=0.02, weight_decay=0.1, momentum=0.5, nesterov=False, ns_coefficients=(2.25, -0.75, -1.0)
    ),
}

EARLY: Mapping[str, Mapping[str, Any]] = {
    **{name: {"lr": 7e-4, "weight_decay": 0.03} for name in INNER},
    "torch's own sgd": {"lr": 2.0**-8, "weight_decay": 2.0**-7},
}
"""What a program sets in the first param group after 13 steps, by the name of the optimizer."""
LATE: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": (0.8, 0.97), "eps": 1e-6},
    "adam": {"betas": (0.8, 0.97), "weight_decay": 0.0},
    "amsgrad": {"betas": (0.8, 0.97), "lr": 3e-3},
    "nesterov": {"momentum": 0.7, "nesterov": False},
    "dampened": {"momentum": 0.7, "dampening": 0.1},
    "torch's own sgd": {"momentum": 0.25},
    "lion": {"betas": (0.8, 0.97)},
}
"""What it sets in the last one after 27."""


@dataclass(frozen=True)
class Life:
    """One run.

    Attributes:
        inner: the wrapped optimizer, of INNER.
        dtype: of the parameters.
        layout: "replicated", "zero1" (by elements), "zero1-parameters", "fsdp2", "gradsync", or "amp".
        fields: of the config: clipping and the form of the state.
        accumulates: each fifth step has two micro-batches.
    """

    inner: str
    dtype: torch.dtype
    layout: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    accumulates: bool = False

    @property
    def world_size(self) -> int:
        """Two ranks where they share work; their gradients differ."""
        return 1 if self.layout in ("replicated", "amp") else 2

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parameters, Muon's matrices first."""
        if self.inner == "muon":
            return (*MATRICES, *SHAPES[:2])
        return SHAPES_OF_GROUPS if self.layout == "fsdp2" else SHAPES


LIVES = {
    "AdamW": Life("adamw", torch.float16, "replicated", {"clip_grad": 3.0}),
    "AdamW, ZeRO-1": Life("adamw", torch.bfloat16, "zero1", {"clip_grad": 3.0}, accumulates=True),
    "AdamW, FSDP2, compact": Life("adamw", torch.float16, "fsdp2", {"clip_grad": 3.0} | CODES | REMAINDERS),
    "AdamW, ZeRO-1, compact": Life("adamw", torch.bfloat16, "zero1", CODES | REMAINDERS, accumulates=True),
    "Adam, 8 bit": Life("adam", torch.float32, "replicated", {"clip_grad": 3.0} | CODES, accumulates=True),
    "Adam with AMSGrad, ZeRO-1 by parameters, 16 bit": Life("amsgrad", torch.float16, "zero1-parameters", HALVES),
    "SGD, GradSync, remainders": Life(
        "nesterov", torch.float16, "gradsync", {"clip_grad": 3.0} | REMAINDERS, accumulates=True
    ),
    "SGD with dampening, FSDP2, 16 bit": Life(
        "dampened", torch.bfloat16, "fsdp2", {"exp_avg_dtype": torch.bfloat16}, accumulates=True
    ),
    "Lion, remainders": Life("lion", torch.bfloat16, "replicated", {"clip_grad": 3.0} | REMAINDERS),
    "Lion, ZeRO-1 by parameters, 16 bit": Life(
        "lion", torch.float16, "zero1-parameters", {"exp_avg_dtype": torch.bfloat16}, accumulates=True
    ),
    "Muon and AdamW, ZeRO-1 by parameters": Life("muon", torch.float16, "zero1-parameters"),
    "SGD, megascale.amp": Life("torch's own sgd", torch.float32, "amp", {"clip_grad": 3.0}),
}


# What is given


def drawn(shape: Sequence[int], seed: int, most: int) -> Tensor:
    """Return whole numbers from ``-most`` to ``most``, fp32, of integer arithmetic: torch's generators could change."""
    word = torch.arange(int(torch.Size(shape).numel())) * 0x9E3779B1 + seed * 0x85EBCA77 & 0xFFFFFFFF
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        word = (word ^ word >> shift) * factor & 0xFFFFFFFF
    return ((word ^ word >> 15) % (2 * most + 1) - most).float().view(tuple(shape))


def gradients(life: Life, step: int, batch: int, rank: int) -> list[Tensor | None]:
    """Return the unscaled gradients of one micro-batch on one rank, fp32, one for each of ``life.shapes``."""
    seed = 1000 * step + 100 * batch + 10 * rank
    grads: list[Tensor | None] = [drawn(shape, seed + i, 31) * UNIT for i, shape in enumerate(life.shapes)]
    if life.inner == "muon":
        grads[: len(MATRICES)] = [_of_matrix(shape, step, seed=i) for i, shape in enumerate(MATRICES)]
    if life.layout == "replicated" and step % 9 == 7:
        grads[1] = None
    last = grads[step % len(grads)]
    if step in OVERFLOWS and rank == life.world_size - 1 and last is not None:
        last.view(-1)[0] = torch.inf
    return grads


def _of_matrix(shape: Sequence[int], step: int, seed: int) -> Tensor:
    """Return the gradient that takes Muon's momentum from where the last landed step has left it to its next value."""
    before = next((one for one in reversed(range(step)) if one not in OVERFLOWS), None)
    old = torch.zeros(tuple(shape)) if before is None else _momentum(shape, before, seed)
    return 2 * _momentum(shape, step, seed) - old


def _momentum(shape: Sequence[int], step: int, seed: int) -> Tensor:
    """Return a matrix with four elements of one magnitude, no two of them in a row or column."""
    signs = drawn((4,), seed + step, 1).add(0.5).sign()
    places = torch.arange(4)
    found = torch.zeros(tuple(shape))
    found[(places + step) % shape[0], (3 * places + step) % shape[1]] = signs * (1 + (step + seed) % 3) * UNIT
    return found


# One life


def live(name: str, backend: str = "reference", device: str = "cpu") -> Digests:
    """Return the hashes of one life. All ranks of its world call this together, and get the same ones."""
    with patch.dict(os.environ, {"MEGASCALE_BACKEND": backend}):  # megascale.amp has no other way to choose one
        return _Run(LIVES[name], backend, device).digests()


class _Run:
    """A model, its optimizer and its scaler, and what they do."""

    def __init__(self, life: Life, backend: str, device: str) -> None:
        self._life, self._device = life, device
        self._ranks = life.world_size
        self._rank = dist.get_rank() if self._ranks > 1 else 0
        self._model = Given(life.shapes)
        with torch.no_grad():
            for i, weight in enumerate(self._model.parameters()):
                weight.copy_(drawn(weight.shape, i, 64) * UNIT)
        self._model.to(device, life.dtype)
        if life.layout == "fsdp2":
            mesh = mesh_of((self._ranks,)) if device == "cpu" else init_device_mesh(device, (self._ranks,))
            fully_shard(self._model, mesh=mesh)
        halves = {"fp16": life.dtype == torch.float16, "bf16": life.dtype == torch.bfloat16}
        self._config = OptimizerConfig(**{**halves, "clip_grad": 0.0, "backend": backend, **life.fields})
        self._scaler: Any = None
        if life.layout == "amp":
            self._scaler = amp.GradScaler(device, 2.0**10, growth_interval=7)
        elif life.dtype == torch.float16:
            self._scaler = DynamicGradScaler(2.0**10, 1.0, 2.0, 0.5, 7, 2)
        self._sync = GradSync(self._model.named_parameters()) if life.layout == "gradsync" else None
        self._optimizer: Any = self._built()

    def _built(self) -> torch.optim.Optimizer:
        named = list(self._model.named_parameters())
        if self._life.layout == "amp":
            return INNER[self._life.inner]([param for _, param in named])
        if self._life.inner != "muon":
            # Two groups, each with options of its own later on.
            groups = [{"params": named[::2]}, {"params": named[1::2]}]
            return self._wrapped(INNER[self._life.inner](groups))
        matrices, others = named[: len(MATRICES)], named[len(MATRICES) :]
        wrapped = [self._wrapped(INNER[kind](list(params))) for kind, params in (("muon", matrices), ("adamw", others))]
        return ChainedOptimizer(wrapped)

    def _wrapped(self, inner: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
        layout = self._life.layout
        if layout.startswith("zero1"):
            shard = "parameters" if layout == "zero1-parameters" else "elements"
            return DistributedOptimizer(inner, self._config, self._scaler, modules=self._model, shard=shard)
        return MixedPrecisionOptimizer(inner, self._config, self._scaler, grad_sync=self._sync)

    def digests(self) -> Digests:
        """Take all steps."""
        found: Digests = {}
        results: list[Tensor] = []
        for step in range(STEPS):
            if step == 13:
                self._optimizer.param_groups[0].update(EARLY[self._life.inner])
            if step == 27:  # Muon's last group is AdamW's
                self._optimizer.param_groups[-1].update(LATE.get(self._life.inner, LATE["adamw"]))
            results += self._step(step)
            if (step + 1) % EVERY == 0:
                found[str(step + 1)] = {what: _hash(tensors) for what, tensors in self._contents(results).items()}
                results = []
        return found

    def _step(self, step: int) -> list[Tensor]:
        """Take one step, and return whether it landed, and the norm of its gradients."""
        num_batches = 2 if self._life.accumulates and step % 5 == 3 else 1
        self._optimizer.zero_grad()
        for batch in range(num_batches):
            grads = [
                None if grad is None else grad.to(self._device)
                for grad in gradients(self._life, step, batch, self._rank)
            ]
            loss = self._model(grads)
            if self._life.layout == "amp":
                result = amp.optimizer_step(loss, self._optimizer, self._scaler, self._config.clip_grad)
                return [result.success, result.grad_norm]
            with self._syncing(batch == num_batches - 1):
                self._optimizer.scale_loss(loss).backward()
        result = self._optimizer.step()
        return [result.success.clone(), result.grad_norm.clone()]

    def _syncing(self, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for a backward, of which only the last one of a step is reduced over ranks."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(is_last)
        if is_last:
            return nullcontext()
        if self._sync is not None:
            return self._sync.no_sync()
        return self._optimizer.no_sync() if self._life.layout.startswith("zero1") else nullcontext()

    def _contents(self, results: list[Tensor]) -> dict[str, dict[str, Any]]:
        """Return all that is hashed, by what it is and by name."""
        found: dict[str, dict[str, Any]] = {
            "weights": dict(self._model.named_parameters()),
            "main_params": {},
            "state": {},
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
            "results": {str(index): result for index, result in enumerate(results)},
        }
        saved = self._optimizer.state_dict()
        found["main_params"] |= saved.get("main_params", {})
        states = saved["state"] if self._life.layout == "amp" else saved["optimizer"]["state"]
        found["state"] |= {f"{name}.{key}": value for name, own in states.items() for key, value in own.items()}
        return found


def _hash(values: Mapping[str, Any]) -> str:
    """Return 16 hex digits of SHA-256 over names, dtypes, shapes and bits, in the order of names."""
    hashed = sha256()
    for name in sorted(values):
        value = values[name]
        if isinstance(value, Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            local = whole.detach().cpu().contiguous()
            hashed.update(f"{name} {local.dtype} {tuple(local.shape)} ".encode())
            hashed.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            hashed.update(f"{name} {value!r} ".encode())
    return hashed.hexdigest()[:16]


# Comparison


def differences(name: str, found: Digests, expected: Digests) -> Iterator[str]:
    """Yield what has other bits than ``expected``, for the first ten steps in which anything has."""
    for steps in expected:
        others = [what for what, digest in expected[steps].items() if found[steps][what] != digest]
        if others:
            yield f"{name}: other {', '.join(others)} in steps {int(steps) - EVERY + 1} to {steps}"
            return


def recorded() -> dict[str, Digests]:
    """Return the hashes in the file, by the name of the life."""
    lives: dict[str, Digests] = json.loads(FILE.read_text())["lives"]
    return lives


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description="Compare the bits of twelve lives with those in tests/data/bits.json.")
    parser.add_argument("--backend", default="reference", help="of the kernels")
    parser.add_argument("--write", metavar="REASON", help="write them into the file, and why they changed")
    options = parser.parse_args()
    ranks = RankPool()
    found = {name: ranks.run(life.world_size, live, name, options.backend, timeout=600) for name, life in LIVES.items()}
    ranks.close()
    file = json.loads(FILE.read_text())
    told = [
        line
        for name, each in found.items()
        for own in each
        for line in differences(name, own, file["lives"].get(name, {}))
    ]
    told = list(dict.fromkeys(told))
    print("\n".join(told) or "All lives have the recorded bits.")
    if options.write is None:
        return 1 if told else 0
    file["changed"] += [f"{line}: {options.write}" for line in told]
    file["lives"] = {name: each[0] for name, each in found.items()}
    FILE.write_text(json.dumps(file, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
