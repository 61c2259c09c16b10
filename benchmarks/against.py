"""Time a step of this checkout beside that of another: both hold the same work in a process each, and take turns.

    python benchmarks/against.py ../earlier --numel 50000000 --tensors 200 --rounds 24 --threads 2

Each rule on parameters of each dtype: unscale, overflow check, clip to norm 1.0, the rule, and the write-back. A round
times one step of each checkout after a pass over a large buffer; who goes first alternates. A ratio is that of the two
steps of one round, so that a slow minute of the machine slows both.

Beside rules, ``--rules`` takes what peers/in_turns.py names: ends of an iteration with megascale.amp, on fp32
parameters, such as ``amp-step``, and AdamW's step of two ranks, ``replicated-2`` and ``sharded-2``.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import IO, Any

import torch
from backend import print_backend
from peers.in_turns import AMP, ON_RANKS, Turn, amp_turn, ranks_turn
from peers.report import base_parser, place

ROOT = Path(__file__).parents[1]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
HELD: dict[str, dict[str, Any]] = {
    "float32": {},
    "remainders": {"store_param_remainders": True},
    "codes": {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8},
}
HELD["compact"] = HELD["remainders"] | HELD["codes"]
"""What a config is given for each kind of states. Codes are Adam's: other rules have no row of them."""
CODED = ("adamw", "adam", "adam-l2", "amsgrad", *ON_RANKS)
WARM_UP = 3
SEED = 0


def serve(rule: str, dtype: torch.dtype, states: str, numel: int, tensors: int, probe: int) -> None:
    """Build the work with the megascale that Python finds. Then time one step for each line that is read."""
    with ExitStack() as stack:
        if rule in AMP:
            before, step = amp_turn(rule, numel, tensors)
        elif rule in ON_RANKS:
            before, step = ranks_turn(rule, dtype, numel, tensors, sys.argv, stack)
        else:
            before, step = rule_turn(rule, dtype, states, numel, tensors)
        cold = torch.ones(probe)
        print(flush=True)
        for _ in sys.stdin:
            cold.add_(1.0)
            before()
            start = time.perf_counter()
            step()
            print((time.perf_counter() - start) * 1e3, flush=True)


def rule_turn(rule: str, dtype: torch.dtype, states: str, numel: int, tensors: int) -> Turn:
    """Return a step of one rule on one rank, which ends the process if it was skipped."""
    import megascale
    from megascale import ConstantGradScaler, MixedPrecisionOptimizer, OptimizerConfig

    decay = {"weight_decay": 0.1}
    rules = {
        "adamw": (torch.optim.AdamW, decay),
        "adam": (torch.optim.Adam, {}),
        "adam-l2": (torch.optim.Adam, decay),
        "amsgrad": (torch.optim.AdamW, decay | {"amsgrad": True}),
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        "lion": (megascale.Lion, decay),
    }
    kind, options = rules[rule]
    torch.manual_seed(SEED)
    length = numel // tensors
    params = [torch.nn.Parameter(torch.randn(length).mul_(0.02).to(dtype)) for _ in range(tensors)]
    inner = kind(params, lr=1e-4, **options)
    half = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16}
    config = OptimizerConfig(**half, clip_grad=1.0, **HELD[states])
    scaler = ConstantGradScaler(1024.0) if dtype == torch.float16 else None
    optimizer = MixedPrecisionOptimizer(inner, config, scaler)
    for param in params:
        param.grad = torch.randn(length).to(dtype)

    def step() -> None:
        if not optimizer.step()[0]:
            sys.exit("the step was skipped")

    return optimizer.get_loss_scale, step


@contextmanager
def served(root: Path, case: list[str], threads: int) -> Iterator[tuple[IO[str], IO[str]]]:
    """Start a process that serves a case with the megascale of a checkout. Yields what it reads, and what it writes."""
    command = [sys.executable, __file__, "--serve", *case]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        yield process.stdin, process.stdout
        process.stdin.close()


def answer(pipes: tuple[IO[str], IO[str]]) -> float:
    """Ask for one step; returns milliseconds."""
    pipes[0].write("step\n")
    pipes[0].flush()
    return float(pipes[1].readline())


def compared(before: Path, case: list[str], rounds: int, threads: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of every round: before, and here."""
    with served(before, case, threads) as first, served(ROOT, case, threads) as second:
        for pipes in (first, second):
            if pipes[1].readline() != "\n":
                sys.exit(f"{' '.join(case)} cannot be built")
        times: list[tuple[float, float]] = []
        for index in range(WARM_UP + rounds):
            if index % 2:
                here, there = answer(second), answer(first)
            else:
                there, here = answer(first), answer(second)
            times.append((there, here))
    return [one for one, _ in times[WARM_UP:]], [one for _, one in times[WARM_UP:]]


def row(rule: str, dtype: str, states: str, there: list[float], here: list[float]) -> str:
    """Return a row of the table."""
    ratios = sorted(new / old for old, new in zip(there, here, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    times = " | ".join(f"{statistics.median(one):.1f} ({min(one):.1f} to {max(one):.1f})" for one in (there, here))
    return f"| {rule} | {dtype} | {states} | {times} | {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} |"


def report(given: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table, each as soon as it is measured."""
    where = place(torch.device("cpu"), given.threads)
    yield f"## A step here and at commit {commit_of(given.before)}\n"
    yield f"{where}; {given.rounds} interleaved rounds; ms, median (min to max).\n"
    arguments = f"--numel {given.numel} --tensors {given.tensors} --rounds {given.rounds} --threads {given.threads}"
    chosen = f"--rules {given.rules} --dtypes {given.dtypes} --states {given.states}"
    yield f"`python benchmarks/against.py ../earlier {arguments} {chosen}`\n"
    yield "| rule | parameters | states | before | here | here / before (median) | (middle half) |"
    yield "|---|---|---|---|---|---|---|"
    sizes = [str(size) for size in (given.numel, given.tensors, given.probe or given.numel)]
    for of in product(given.rules.split(","), given.dtypes.split(","), given.states.split(",")):
        if "exp_avg_dtype" not in HELD[of[2]] or of[0] in CODED:
            yield row(*of, *compared(given.before, [*of, *sizes], given.rounds, given.threads))


def commit_of(checkout: Path) -> str:
    """Return the first letters of a checkout's commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Compare, print, and write the table where asked; or serve one case."""
    if sys.argv[1:2] == ["--serve"]:
        rule, dtype, states, *numbers = sys.argv[2:8]
        return serve(rule, DTYPES[dtype], states, *map(int, numbers))
    parser = base_parser(__doc__, rounds=24)
    parser.add_argument("before", type=Path, help="a checkout of megascale to compare with")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rules", default="adamw", help="separated by commas")
    parser.add_argument("--dtypes", default="float16,bfloat16", help="separated by commas")
    parser.add_argument("--states", default="float32", help=f"separated by commas, of {', '.join(HELD)}")
    given = parser.parse_args()
    print_backend()
    lines = []
    for line in report(given):
        print(line, flush=True)
        lines.append(line)
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
