"""Time native.c's libraries of a wheel beside the one that is compiled here, and the torch backend, on this CPU.

    python benchmarks/native_levels.py --numel 10000000 --tensors 50 --rounds 40 --threads 2

One update (AdamW, fp16 model params and gradients, fp32 main params and moments; with ``--states compact`` remainders
and 8-bit moments) and one measure of the gradients, ms: median (smallest to largest). All take turns. The last column
tells whether all of them have left the same bits.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from megascale.kernels import AdamHyper, Decision, NativeBackend, Operands, TorchBackend
from megascale.kernels.compact_moments import SCALE_SUFFIX, num_groups
from megascale.kernels.compiler import find_compiler
from megascale.kernels.native import levels, library
from megascale.kernels.protocol import Backend
from megascale.kernels.remainders import encode

HYPER = AdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.01, True, False, False)
COMPILED, OTHER = "native, compiled here", "torch"
WARM_UP = 3


def backends() -> dict[str, Backend]:
    """Return what is compared. The wheel's libraries are compiled as setup.py does."""
    compiler = find_compiler("CC", ("cc", "gcc", "clang")) or ()
    found: dict[str, Backend] = {COMPILED: NativeBackend()}
    for name in levels.supported():
        backend = found[f"native, `{name}`"] = NativeBackend()
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "library.so"
            for command in levels.commands(compiler, name, target):
                subprocess.run(command, check=True)
            backend._library = library._declare(ctypes.CDLL(str(target)))
    return found | {OTHER: TorchBackend()}


def operands(numel: int, tensors: int, states: str) -> Operands:
    """Return what is updated: the same numbers in every call."""
    generator = torch.Generator().manual_seed(0)
    mains = [torch.randn(numel // tensors, generator=generator) for _ in range(tensors)]
    made = Operands(
        model=[main.half() for main in mains],
        main=mains,
        grad=[torch.randn(numel // tensors, generator=generator).half() for _ in mains],
        state={name: [torch.zeros_like(main) for main in mains] for name in ("exp_avg", "exp_avg_sq")},
        step=[torch.tensor(0.0) for _ in mains],
    )
    if states == "compact":
        made.remainder = [encode(main, torch.float16)[1] for main in mains]
        for main in mains:
            main.untyped_storage().resize_(0)
        for name, dtype in {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}.items():
            made.state[name] = [torch.zeros(main.numel(), dtype=dtype) for main in mains]
            made.state[name + SCALE_SUFFIX] = [torch.zeros(num_groups(main.numel())) for main in mains]
    return made


def tensors_of(found: Operands) -> list[Tensor]:
    """Return all that an update writes."""
    states = (tensor for column in found.state.values() for tensor in column)
    return [*(found.remainder or found.main), *found.model, *states]


def cell(times: list[float], against: list[float]) -> str:
    """Return median, range, and the median as a ratio."""
    median = statistics.median(times)
    return f"{median:.2f} ({min(times):.2f} to {max(times):.2f}) | {median / statistics.median(against):.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"numel": 10_000_000, "tensors": 50, "rounds": 40, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--states", choices=("float32", "compact"), default="float32")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    decision = Decision(*torch.tensor([0.0, 2.0**-10, 1.0, 0.0]).unbind())
    compared = backends()
    if given.states == "compact":
        del compared[OTHER]  # its remainders are decoded by the optimizer, not by the update
    held = {name: operands(given.numel, given.tensors, given.states) for name in compared}
    updates: dict[str, list[float]] = {name: [] for name in compared}
    measures: dict[str, list[float]] = {name: [] for name in compared}
    for turn in range(given.rounds + WARM_UP):
        for name, backend in compared.items():
            start = time.perf_counter()
            backend.adam_(held[name], HYPER, decision)
            middle = time.perf_counter()
            backend.measure(held[name].grad, False)
            if turn >= WARM_UP:
                updates[name].append(1e3 * (middle - start))
                measures[name].append(1e3 * (time.perf_counter() - middle))
    heads = ("backend", "update, ms", "/ compiled here", "measure, ms", "/ compiled here", "same bits")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in compared:
        same = all(map(torch.equal, tensors_of(held[name]), tensors_of(held[COMPILED])))
        cells = (cell(updates[name], updates[COMPILED]), cell(measures[name], measures[COMPILED]))
        print(f"| {name} | {' | '.join(cells)} | {'yes' if same else 'no'} |")


if __name__ == "__main__":
    main()
