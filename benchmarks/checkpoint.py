"""Time the saving of a checkpoint: ours, torch.save with fsync, torch.distributed.checkpoint, and the bare bytes.

    python benchmarks/checkpoint.py --numel 50_000_000 --tensors 200 --rounds 8 --folder /tmp \
        --out benchmarks/results/checkpoint_cpu.md

fp16 parameters with fp32 main params and AdamW's moments: 14 bytes a parameter. All contenders save the same state, one
after the other in every round, each into an empty folder after all earlier writes have reached the disk, and each waits
until its own bytes have. Ours adds checksums. An asynchronous save is timed until it returns: training goes on then. A
ratio is taken within each round: what slows the disk slows both. Seconds on a processor are those of rank 0's process:
they do not grow with what else the machine does. ``--out FILE.md`` also writes every round to FILE.csv. ``--skip`` is
for 20,000 tensors, where torch.distributed.checkpoint takes most of the time.

``--ranks N``: N processes over gloo, which share the threads, hold the same state, as under DistributedDataParallel.
Ours and torch.distributed.checkpoint save on all of them, and ours compares them; torch.save and the bare bytes are
rank 0's alone. The time is rank 0's, from a barrier before to a barrier behind.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from peers.report import place
from torch import Tensor, nn

from megascale import DynamicGradScaler, MixedPrecisionOptimizer, OptimizerConfig
from megascale.checkpoint import Checkpointer

RIVAL = "torch.save, fsync"
TARGETS = {"megascale": 1.1, "megascale, asynchronous: until it returns": 0.15}


class Saved:
    """A model and its optimizer, after one step."""

    def __init__(self, numel: int, tensors: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Module()
        for index in range(tensors):
            start, stop = numel * index // tensors, numel * (index + 1) // tensors
            self.model.register_parameter(f"weight{index}", nn.Parameter(torch.randn(stop - start).half()))
        inner = torch.optim.AdamW(self.model.named_parameters(), lr=1e-3)
        self.optimizer = MixedPrecisionOptimizer(inner, OptimizerConfig(fp16=True), DynamicGradScaler())
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.get_loss_scale()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the live state of both."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(copy=False)}

    def tensors(self) -> list[Tensor]:
        """Return all tensors of it."""
        return list(_tensors(self.state()))


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest.detach()
    elif isinstance(nest, (dict, list, tuple)):
        for value in nest.values() if isinstance(nest, dict) else nest:
            yield from _tensors(value)


@contextmanager
def synced(path: Path) -> Iterator[Any]:
    """Open a file for writing; wait until it is on disk."""
    with open(path, "wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def on_first_rank(save: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return ``save`` for rank 0, and nothing to do for the others."""
    return (lambda folder: None) if dist.is_initialized() and dist.get_rank() else save


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def contenders(saved: Saved) -> dict[str, tuple[Callable[[Path], Any], Callable[[], Any]]]:
    """Return by name what saves into a folder and is timed, and what follows untimed."""

    def by_torch(folder: Path) -> None:
        with synced(folder / "checkpoint.pt") as stream:
            torch.save(saved.state(), stream)

    def by_dcp(folder: Path) -> None:
        dcp.save(saved.state(), checkpoint_id=folder / "dcp", no_dist=not dist.is_initialized())

    def bytes_alone(folder: Path) -> None:
        with synced(folder / "bytes") as stream:
            for tensor in saved.tensors():
                stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    held: dict[bool, Checkpointer] = {}

    def ours(folder: Path, *, async_save: bool = False) -> None:
        if async_save not in held:
            held[async_save] = Checkpointer(folder, async_save=async_save)
        held[async_save].save(1, saved.model, saved.optimizer)

    return {
        "megascale": (ours, lambda: None),
        RIVAL: (on_first_rank(by_torch), lambda: None),
        "torch.distributed.checkpoint.save": (by_dcp, lambda: None),
        "bytes alone, fsync": (on_first_rank(bytes_alone), lambda: None),
        "megascale, asynchronous: until it returns": (partial(ours, async_save=True), lambda: held[True].wait()),
    }


Times = dict[str, list[tuple[float, float]]]
"""Seconds of each round, of the clock and of the processor in this process, by contender."""


def measure(saved: Saved, folder: Path, rounds: int, skip: Sequence[str] = ()) -> Times:
    """Return this rank's times of all contenders but ``skip``; a round before the first is not counted.

    Another contender begins each round. All ranks call it together, with the same ``folder``.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    known = {name: pair for name, pair in contenders_of(saved).items() if name not in skip}
    times: Times = {name: [] for name in known}
    target = folder / "save"
    for number in range(rounds + 1):
        for turn in range(len(known)):
            name, (save, afterwards) = list(known.items())[(number + turn) % len(known)]
            barrier()
            if is_first:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                os.sync()
            barrier()
            start, busy = time.perf_counter(), time.process_time()
            save(target)
            busy = time.process_time() - busy
            barrier()
            spent = time.perf_counter() - start
            afterwards()
            if number:
                times[name].append((spent, busy))
    return times


def serve(rank: int, ranks: int, given: argparse.Namespace, tensors: int, folder: str) -> None:
    """Be one of several ranks; rank 0 leaves its times, and the bytes of the state, in ``folder``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, given.threads // ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    result = measure_alone(given, tensors, folder)
    if rank == 0:
        (Path(folder) / "times").write_text(json.dumps(result))
    barrier()
    dist.destroy_process_group()


def measure_alone(given: argparse.Namespace, tensors: int, folder: str) -> tuple[int, Times]:
    """Return the bytes of the state and what :func:`measure` does, of this process."""
    saved = Saved(given.numel, tensors)
    times = measure(saved, Path(folder), given.rounds, given.skip)
    return sum(tensor.nbytes for tensor in saved.tensors()), times


def measure_ranks(given: argparse.Namespace, tensors: int) -> tuple[int, Times]:
    """Do so with as many ranks as asked for."""
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.ranks == 1:
            return measure_alone(given, tensors, folder)
        mp.spawn(serve, args=(given.ranks, given, tensors, folder), nprocs=given.ranks)
        nbytes, times = json.loads((Path(folder) / "times").read_text())
        return nbytes, times


_made: dict[int, Any] = {}


def contenders_of(saved: Saved) -> dict[str, tuple[Callable[[Path], Any], Callable[[], Any]]]:
    """Return :func:`contenders`, the same objects for the same state: an asynchronous saver lives on."""
    return _made.setdefault(id(saved), contenders(saved))


def table(times: Times) -> Iterator[str]:
    """Yield the rows: seconds, the ratio within rounds, and what was asked for."""
    ratio = "of torch.save's, median of rounds (min to max)"
    yield f"| save | s, median (min to max) | on a processor | {ratio} | asked for |"
    yield "|---|---|---|---|---|"
    for name, own in times.items():
        clock, busy = [spent for spent, _ in own], [spent for _, spent in own]
        ratios = [mine / other for mine, (other, _) in zip(clock, times[RIVAL], strict=True)]
        asked = f"at most {TARGETS[name]}" if name in TARGETS else "-"
        yield f"| {name} | {spread(clock)} | {statistics.median(busy):.2f} | {spread(ratios)} | {asked} |"


def spread(values: list[float]) -> str:
    """Return the median, the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def arguments_of_command() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--tensors", default="200", help="numbers of tensors, separated by commas")
    parser.add_argument("--skip", action="append", default=[], help="a contender's name, to leave it out; repeatable")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1, help="processes that save together, over gloo")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--out", type=Path, help="write the tables to this file too, and every round beside it as .csv")
    given = parser.parse_args()
    for name in ("rounds", "ranks"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(given, name)}")
    return given


def main() -> None:
    """Measure, print, and write the tables where asked."""
    given = arguments_of_command()
    warnings.simplefilter("ignore")
    torch.set_num_threads(given.threads)
    busy = [os.getloadavg()[0]]
    tables: list[str] = []
    rows = ["tensors,contender,round,s,processor_s"]
    for tensors in map(int, given.tensors.split(",")):
        nbytes, times = measure_ranks(given, tensors)
        tables += [f"### {nbytes / 1e6:,.0f} MB, {tensors:,} parameters' tensors", "", *table(times), ""]
        rows += [
            f'{tensors},"{name}",{index},{spent:.3f},{busy:.3f}'
            for name, own in times.items()
            for index, (spent, busy) in enumerate(own)
        ]
        busy.append(os.getloadavg()[0])
    ranks = "1 rank" if given.ranks == 1 else f"{given.ranks} ranks"
    where = f"{place(torch.device('cpu'), given.threads)}; {ranks}, {given.rounds} rounds."
    others = f"Load average of the machine, which others share: {', '.join(f'{load:.1f}' for load in busy)}."
    lines = ["## Saving a checkpoint", "", f"{where} {others}", ""]
    lines += [f"`python benchmarks/checkpoint.py {shlex.join(sys.argv[1:])}`", "", *tables]
    text = "\n".join(lines)
    print(text)
    if given.out is not None:
        given.out.write_text(text)
        given.out.with_suffix(".csv").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
