"""Ranks that do not do what the others do, and numbers that are none: what each rank is told, and how soon."""

import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megascale import ParallelGroups
from megascale.checkpoint import Checkpointer
from megascale.rank_watch import RankWatch
from tests.distributed.test_distributed_optimizer import flat, net, same, sharded, weights
from tests.pool import RankPool
from tests.reliability.faults import Fault

TIMEOUT_S = 6.0
PATIENCE_S = 1.0
STEPS = 6
FAULTY = 1
"""The rank that is at fault."""


def _hang(step: int) -> None:
    if step == 3 and dist.get_rank() == FAULTY:
        time.sleep(3 * TIMEOUT_S)


def _raise(step: int) -> None:
    if step == 3 and dist.get_rank() == FAULTY:
        raise ValueError("no batch 3")


def _nothing(step: int) -> None:
    pass


MISDEEDS: dict[str, tuple[Callable[[int], None], int, int]] = {
    "a rank hangs": (_hang, STEPS, -1),
    "a rank raises an error of its own": (_raise, STEPS, -1),
    "a rank has fewer batches": (_nothing, STEPS - 2, -1),
    "a rank alone saves": (_nothing, STEPS, 3),
}
"""What it does before each step, how many steps it has, and the step at which it saves alone."""


def misbehave(kind: str, folder: Path) -> str:
    """Train while rank 1 does ``kind``; return the error that this rank ends with, "" for none."""
    before_step, steps, save_at = MISDEEDS[kind]
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    module = net()
    optimizer = sharded(module, groups=ParallelGroups(data_parallel=group))
    checkpointer = Checkpointer(folder, groups=ParallelGroups(data_parallel=group))
    faulty = dist.get_rank() == FAULTY
    try:
        with RankWatch(PATIENCE_S):
            for step in range(steps if faulty else STEPS):
                before_step(step)
                optimizer.zero_grad()
                optimizer.scale_loss(module(torch.randn(6, 4).half()).float().square().mean()).backward()
                optimizer.step()
                if faulty and step == save_at:
                    checkpointer.save(step, module, optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


NAMED = {
    "a rank hangs": "time.sleep(3 * TIMEOUT_S)",
    "a rank raises an error of its own": "has ended with ValueError: no batch 3",
    "a rank has fewer batches": "has finished",
    "a rank alone saves": "Checkpointer.save",
}
"""What the other rank must be told."""


def misdeeds(folder: Path, ranks: RankPool) -> Iterator[Fault]:
    """Inject each of MISDEEDS. The error on rank 0 names rank 1, and what it did instead."""
    for kind, named in NAMED.items():
        with ranks.spawn(2, misbehave, kind, folder / kind) as fresh:
            told = str(fresh.outcomes(timeout=60, grace=4 * TIMEOUT_S)[0].value)
        yield Fault("ranks", kind, told, f"Rank {FAULTY} " in told and named in told)


def poison(kind: str) -> tuple[list[bool], bool, str]:
    """Train with a NaN in rank 1's data, gradients or parameters.

    Returns whether each step landed, whether the skipped step changed no bit, and the error that ended it.
    """
    module = net()
    optimizer = sharded(module)
    landed: list[bool] = []
    unchanged = False
    try:
        for step in range(200 if kind == "parameters" else 6):
            faulty = step == 3 and dist.get_rank() == FAULTY
            batch = torch.randn(6, 4).half()
            if faulty and kind == "data":
                batch[2, 1] = math.nan
            if step == 3 and kind == "parameters":
                with torch.no_grad():
                    module.second.weight[0, 0] = math.nan
            optimizer.zero_grad()
            factor = math.nan if faulty and kind == "gradients" else 1.0
            optimizer.scale_loss(module(batch).float().square().mean() * factor).backward()
            before = flat(optimizer.state_dict()) | weights(module) if step == 3 else {}
            landed.append(bool(optimizer.step().success))
            if step == 3:
                unchanged = same(before, flat(optimizer.state_dict()) | weights(module))
    except Exception as error:
        return landed, unchanged, f"{type(error).__name__}: {error}"
    return landed, unchanged, ""


def poisons(ranks: RankPool) -> Iterator[Fault]:
    """Inject each NaN: the step is skipped on all ranks, or the parameter is named on all."""
    for kind in ("data", "gradients", "parameters"):
        first, second = ranks.run(2, poison, kind)
        landed, unchanged, error = first
        if kind == "parameters":
            held = first == second and "NonFiniteParamError" in error and "second.weight" in error
            yield Fault("NaN", "in parameters", error, held)
            continue
        held = first == second and landed == [True, True, True, False, True, True] and unchanged
        yield Fault("NaN", f"in one rank's {kind}", "that step is skipped on all ranks, no bit changes", held)
