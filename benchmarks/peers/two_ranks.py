"""Count the collectives of a step where they are real: on two ranks of gloo, which compare what they must share."""

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from peers.contenders import Entry
from peers.measure import count_collectives
from peers.rounds import Run
from peers.work import given_work

TENSORS = 3
NUMEL = TENSORS * 64
"""Of the work on which collectives are counted: how many there are does not depend on the size."""

TIMEOUT = timedelta(seconds=60)


def count_on_two_ranks(runs: Sequence[Run], dtype: torch.dtype, device: torch.device) -> None:
    """Write into each run that has counts which collectives a step issues; None where the contender cannot be built.

    Why it cannot is written to stderr.
    """
    counted = [run for run in runs if not run.failure and run.counts is not None]
    entries = [run.entry for run in counted]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_count, args=(entries, dtype, device, folder), nprocs=2)
        found: list[Counter[str] | str] = torch.load(Path(folder, "found"), weights_only=False)
    for run, collectives in zip(counted, found, strict=True):
        if isinstance(collectives, str):
            print(f"{run.label}: collectives are not counted: {collectives}", file=sys.stderr)
        elif run.counts is not None:
            run.counts.collectives = collectives


def _count(rank: int, entries: Sequence[Entry], dtype: torch.dtype, device: torch.device, folder: str) -> None:
    """Be one of the two ranks. Rank 0 saves, for each entry, its collectives or why there are none."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=TIMEOUT)
    work = given_work(NUMEL, TENSORS, dtype, device)
    found: list[Counter[str] | str] = []
    for entry in entries:
        try:
            stepper = entry.make(work)
            stepper.prepare()
            stepper.step()
            stepper.prepare()
            found.append(count_collectives(stepper.step))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    if rank == 0:
        torch.save(found, Path(folder, "found"))
    dist.barrier()
    dist.destroy_process_group()
