"""Time native.c's libraries of a wheel beside the one that is compiled here, and the torch backend, on this CPU.

    python benchmarks/native_levels.py --numel 10000000 --tensors 50 --rounds 40 --threads 2

One update (AdamW, fp16 model params and gradients, fp32 main params and moments) and one measure of the gradients, ms:
median (smallest to largest). All take turns. The last column tells whether all of them have left the same bits.
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
from megascale.kernels.compiler import find_compiler
from megascale.kernels.native import levels, library
from megascale.kernels.protocol import Backend

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


def operands(numel: int, tensors: int) -> Operands:
    """Return what is updated: the same numbers in every call."""
    generator = torch.Generator().manual_seed(0)
    mains = [torch.randn(numel // tensors, generator=generator) for _ in range(tensors)]
    return Operands(
        model=[main.half() for main in mains],
        main=mains,
        grad=[torch.randn(numel // tensors, generator=generator).half() for _ in mains],
        state={name: [torch.zeros_like(main) for main in mains] for name in ("exp_avg", "exp_avg_sq")},
        step=[torch.tensor(0.0) for _ in mains],
    )


def tensors_of(found: Operands) -> list[Tensor]:
    """Return all that an update writes."""
    return [*found.main, *found.model, *(tensor for column in found.state.values() for tensor in column)]


def cell(times: list[float], against: list[float]) -> str:
    """Return median, range, and the median as a ratio."""
    median = statistics.median(times)
    return f"{median:.2f} ({min(times):.2f} to {max(times):.2f}) | {median / statistics.median(against):.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"numel": 10_000_000, "tensors": 50, "rounds": 40, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    decision = Decision(*torch.tensor([0.0, 2.0**-10, 1.0, 0.0]).unbind())
    compared = backends()
    held = {name: operands(given.numel, given.tensors) for name in compared}
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
