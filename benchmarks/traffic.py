"""Time the bare traffic of a step under every rule: what this machine's memory allows, whatever the arithmetic.

    python benchmarks/traffic.py --rounds 12 --threads 2 --device cpu --out benchmarks/results/traffic_cpu.md

Loops in C over the same tables: gradients are read, then read once more, the last ones first as caches may hold them,
while the main param and the moments, all fp32, are read and written, and a 16-bit model param is written past the
caches. `step.py --matrix` compares each rule with AdamW on fp16 parameters in GB/s; here the same ratios are those of
bare loops. A rule that mostly reads has the lower ratio: a core waits for what it reads, and not for what is written
back later.
"""

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from peers.matrix import named
from peers.report import PROBE, base_parser, place
from peers.rounds import Bandwidth
from peers.rules import ADAMW, FP32_MOMENTS, RULES
from torch import Tensor

from megascale.kernels import native
from megascale.kernels.compiler import find_compiler, machine_flag
from megascale.kernels.library_build import Recipe, load, share_openmp

SOURCE = Path(__file__).parent / "peers" / "traffic.c"
HEADERS = Path(native.__file__).parent
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
COLUMNS = 4
"""Columns of fp32 that a table has: the main param and up to three moments."""
YARDSTICK = ADAMW, torch.float16


def library() -> ctypes.CDLL:
    """Return traffic.c as a library that shares torch's threads."""
    compiler = find_compiler("CC", ("cc", "gcc", "clang"))
    if compiler is None or not share_openmp():
        sys.exit("bare loops need a C compiler, and torch built with OpenMP")
    flags = ("-std=c11", "-O3", "-fPIC", "-fopenmp", machine_flag(), f"-I{HEADERS}")
    loaded = load(Recipe(compiler, SOURCE, flags, (), ((HEADERS / "vector.h").read_text(),)), ctypes.CDLL)
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    loaded.read_grads.argtypes = [pointer, count, count, count, ctypes.c_int]
    loaded.read_grads.restype = ctypes.c_float
    loaded.update.argtypes = [pointer, count, count, count, count, ctypes.c_int]
    loaded.update.restype = None
    return loaded


class Loops:
    """The two passes of a rule on parameters of one dtype.

    Args:
        grads, models, columns: tensors of equal length; ``columns`` are fp32, as many lists as a rule may need.
    """

    def __init__(
        self, rule: str, dtype: torch.dtype, grads: list[Tensor], models: list[Tensor], columns: list[list[Tensor]]
    ) -> None:
        self.rule, self.dtype = rule, dtype
        self.columns = 1 + sum(RULES[rule].states)
        self.numel = grads[0].numel()
        rows = np.zeros((len(grads), 2 + COLUMNS), dtype=np.int64)
        for column, tensors in enumerate([grads, models, *columns[: self.columns]]):
            rows[:, column] = [tensor.data_ptr() for tensor in tensors]
        self.rows = rows
        self.bytes = sum(RULES[rule].traffic(dtype.itemsize, dtype.itemsize, FP32_MOMENTS).values())
        self.milliseconds: list[float] = []

    def run(self, loops: ctypes.CDLL, threads: int) -> None:
        """Time both passes once."""
        where = self.rows.ctypes.data, len(self.rows), self.numel, TYPES[self.dtype]
        start = time.perf_counter()
        loops.read_grads(*where, threads)
        loops.update(*where, self.columns, threads)
        self.milliseconds.append((time.perf_counter() - start) * 1e3)

    def rates(self) -> list[float]:
        """Return GB/s of each round."""
        return [self.bytes * self.numel * len(self.rows) / ms / 1e6 for ms in self.milliseconds]


def table(measured: Sequence[Loops]) -> str:
    """Return the Markdown of all loops."""
    [yardstick] = [loops for loops in measured if (loops.rule, loops.dtype) == YARDSTICK]
    heads = ["rule", "parameters", "median ms", "bytes / parameter", "of them read", "GB/s"]
    heads += ["of AdamW's in fp16 (median)", "(middle half)"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for loops in measured:
        ratios = sorted(one / other for one, other in zip(loops.rates(), yardstick.rates(), strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        cells = [
            loops.rule,
            named(loops.dtype),
            f"{statistics.median(loops.milliseconds):.1f}",
            str(loops.bytes),
            str(2 * loops.dtype.itemsize + 4 * loops.columns),
            f"{statistics.median(loops.rates()):.1f}",
            f"{statistics.median(ratios):.2f}",
            f"{low:.2f} to {high:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> list[Loops]:
    """Time all loops in every round, each after a pass that leaves caches cold."""
    loops, device = library(), torch.device("cpu")
    length = arguments.numel // arguments.tensors // 64 * 64
    bandwidth = Bandwidth(arguments.probe or PROBE["cpu"], device)

    def made(dtype: torch.dtype) -> list[Tensor]:
        # Not zeros: those have no memory until they are written, and gradients never are.
        return [torch.ones(length, dtype=dtype) for _ in range(arguments.tensors)]

    columns = [made(torch.float32) for _ in range(COLUMNS)]
    tensors = {dtype: (made(dtype), made(dtype)) for dtype in TYPES}
    measured = [Loops(rule, dtype, *tensors[dtype], columns) for rule in RULES for dtype in TYPES]
    distinct = {(one.columns, one.dtype): one for one in reversed(measured)}  # rules of the same traffic are one
    for _ in range(arguments.rounds + 1):  # the first warms up
        for one in distinct.values():
            bandwidth.measure()
            one.run(loops, arguments.threads)
    for one in distinct.values():
        del one.milliseconds[0]
    return sorted(distinct.values(), key=measured.index)


def main() -> None:
    """Measure, print, and write the table where asked."""
    parser = base_parser(__doc__, rounds=12)
    parser.add_argument("--tensors", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        parser.error(f"--device must be cpu, not {arguments.device}: the loops run there")
    if not 0 < arguments.tensors * 64 <= arguments.numel:
        parser.error(f"--tensors {arguments.tensors} must leave 64 of --numel {arguments.numel} to each")
    torch.set_num_threads(arguments.threads)
    measured = measure(arguments)
    options = " ".join(f"--{name} {getattr(arguments, name)}" for name in ("numel", "tensors", "rounds", "threads"))
    text = "\n\n".join(
        [
            "## The bare traffic of a step under every rule on CPU",
            f"{place(torch.device('cpu'), arguments.threads)}; {arguments.rounds} interleaved rounds.",
            f"`python benchmarks/traffic.py {options} --device cpu`",
            table(measured),
        ]
    )
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
