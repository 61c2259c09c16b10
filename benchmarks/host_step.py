"""Times the update of a step in host memory beside what other programs run there, on one machine, in turns.

    pip install deepspeed ninja
    git clone https://github.com/PrimeIntellect-ai/prime-rl ../prime-rl
    python benchmarks/host_step.py --prime-rl ../prime-rl/src/prime_rl/trainer/optim/cpu_adam \
        --out benchmarks/results/host_step.md

bf16 weights and gradients, fp32 main params, AdamW. Contenders take turns; a pass over other memory empties the caches
before each step. A ratio compares megascale's step with the contender's of the same round. megascale's whole step looks
for inf and NaN, takes the norm over all gradients and clips to it; *update alone* is the part of it that its kernel
takes: AdamW and the write-back. prime-rl's kernel multiplies by a clip coefficient that it is given: with
torch's norm it does what the whole step does, but for the check. The casts around torch's and DeepSpeed's AdamW are
bf16 gradients to fp32, and fp32 main params to bf16 weights; they take no norm. What is not there has no row.
"""

import argparse
import gc
import importlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from backend import print_backend
from peers.report import place
from peers.rounds import Bandwidth, balanced_order, garbage_outside
from torch import nn

from megascale import MixedPrecisionOptimizer, OptimizerConfig

RATE, BETAS, EPS, DECAY, CLIP, WARM_UP = 1e-3, (0.9, 0.999), 1e-8, 0.01, 1.0, 3
CODES: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
WHOLE, ALONE = "megascale, whole step", "megascale, update alone"
FEWER = {
    "megascale, whole step, 8-bit moments": CODES,
    "megascale, whole step, 8-bit moments and 16-bit remainders": {**CODES, "store_param_remainders": True},
}


class Work:
    """The weights and gradients that every contender gets a copy of."""

    def __init__(self, numel: int, tensors: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (numel // tensors,)
        self.weights = [torch.randn(shape, generator=generator).bfloat16() for _ in range(tensors)]
        self.grads = [torch.randn(shape, generator=generator).bfloat16() for _ in range(tensors)]

    def params(self) -> list[nn.Parameter]:
        """Return new parameters with gradients."""
        params = [nn.Parameter(weight.clone()) for weight in self.weights]
        for param, grad in zip(params, self.grads, strict=True):
            param.grad = grad.clone()
        return params


class Ours:
    """A step of ours."""

    def __init__(self, work: Work, **options: Any) -> None:
        inner = torch.optim.AdamW(work.params(), RATE, BETAS, EPS, weight_decay=DECAY)
        self.optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(bf16=True, clip_grad=CLIP, **options))

    def prepare(self) -> None:
        """Nothing: gradients stay."""

    def step(self) -> float | None:
        """Take the step. Returns its milliseconds, None: those of this call."""
        self.optimizer.step()
        return None


class Alone(Ours):
    """The same step, of which the kernel's part counts."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        # Earlier commits, which may be measured beside this one, called it `backend`.
        backend = getattr(self.optimizer, "_backend", None) or self.optimizer.backend  # type: ignore[attr-defined]
        self.taken = 0.0
        adam = backend.adam_

        def timed(*given: Any) -> Any:
            start = time.perf_counter()
            flags = adam(*given)
            self.taken += (time.perf_counter() - start) * 1e3
            return flags

        backend.adam_ = timed  # type: ignore[method-assign]

    def step(self) -> float | None:
        """See :class:`Ours`."""
        self.taken = 0.0
        super().step()
        return self.taken


class Cast:
    """An AdamW on fp32 copies of the parameters, between two casts."""

    def __init__(self, work: Work, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.params = work.params()
        self.mains = [nn.Parameter(param.detach().float()) for param in self.params]
        for main in self.mains:
            main.grad = torch.empty_like(main)
        self.optimizer = make(self.mains)

    def prepare(self) -> None:
        """Nothing: gradients stay."""

    @torch.no_grad()
    def step(self) -> None:
        """Cast, update, cast."""
        torch._foreach_copy_([main.grad for main in self.mains], [param.grad for param in self.params])
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.mains)


class PrimeRl:
    """prime-rl's kernel, alone or after torch's norm."""

    def __init__(self, work: Work, module: Any, *, norm: bool) -> None:
        self.kernel, self.norm = module.adamw_step, norm
        self.weights, self.grads = [one.clone() for one in work.weights], [one.clone() for one in work.grads]
        self.mains = [weight.float() for weight in self.weights]
        self.averages = [[torch.zeros_like(main) for main in self.mains] for _ in range(2)]
        self.steps = [torch.zeros(()) for _ in self.mains]

    def prepare(self) -> None:
        """Nothing: gradients stay."""

    def step(self) -> None:
        """Measure the norm, if asked for, and update."""
        factor = 1.0
        if self.norm:
            total = torch.nn.utils.get_total_norm(self.grads)
            factor = min(1.0, CLIP / (total.item() + 1e-6))
        self.kernel(
            self.mains, self.grads, *self.averages, self.steps, self.weights,
            lr=RATE, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY, eps=EPS, gradient_scale=factor,
        )  # fmt: skip


def contenders(work: Work, prime_rl: Path | None) -> dict[str, Any]:
    """Return what can be timed here, by name."""
    found: dict[str, Any] = {WHOLE: Ours(work), ALONE: Alone(work)}
    found |= {name: Ours(work, **options) for name, options in FEWER.items()}
    if prime_rl is not None:
        module = _load(prime_rl)
        found["prime-rl, kernel alone"] = PrimeRl(work, module, norm=False)
        found["prime-rl, kernel and torch's norm"] = PrimeRl(work, module, norm=True)
    options: dict[str, Any] = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    found[f"torch {torch.__version__}, fused AdamW with both casts, no norm"] = Cast(
        work, lambda params: torch.optim.AdamW(params, fused=True, **options)
    )
    if importlib.util.find_spec("deepspeed") is not None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        name = f"DeepSpeedCPUAdam {version('deepspeed')} with both casts, no norm"
        found[name] = Cast(work, lambda params: adam(params, adamw_mode=True, **options))
    return found


def _load(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("cpu_adam", folder / "__init__.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"--prime-rl {folder}: no __init__.py there; give the folder cpu_adam of a clone of prime-rl")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(found: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round."""
    names, cooling = list(found), Bandwidth(50_000_000, torch.device("cpu"))
    times: dict[str, list[float]] = {name: [] for name in names}
    with garbage_outside():
        for turn in range(-WARM_UP, rounds):
            for index in balanced_order(len(names), turn % len(names)):
                contender = found[names[index]]
                gc.collect()
                cooling.measure()
                contender.prepare()
                start = time.perf_counter()
                taken = contender.step()
                if turn >= 0:
                    times[names[index]].append(taken or (time.perf_counter() - start) * 1e3)
    return times


def table(times: dict[str, list[float]]) -> str:
    """Return a Markdown table."""
    lines = ["| | ms | whole step / it | update alone / it |", "|---|---|---|---|"]
    for name, row in times.items():
        cells = [_cell(row, ".1f")]
        cells += [_cell([a / b for a, b in zip(times[ours], row, strict=True)], ".2f") for ours in (WHOLE, ALONE)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"numel": 20_000_000, "tensors": 100, "rounds": 28, "threads": torch.get_num_threads()}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--prime-rl", type=Path, help="the folder cpu_adam of a clone of prime-rl; else it has no row")
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args()
    print_backend()
    torch.set_num_threads(given.threads)
    times = measure(contenders(Work(given.numel, given.tensors), given.prime_rl), given.rounds)
    text = "\n".join(
        [
            "## A step in host memory, beside others' kernels",
            "",
            place(torch.device("cpu"), given.threads),
            "",
            f"{given.numel:,} bf16 parameters in {given.tensors} tensors, {given.rounds} rounds: medians (min to max).",
            "",
            table(times),
        ]
    )
    print(text)
    if given.out is not None:
        given.out.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
